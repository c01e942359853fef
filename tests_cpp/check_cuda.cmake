# Checks liblltm's GPU code: every kernel for every architecture, without spilled registers, and PTX
# for newer GPUs. Wide kernels have 16-byte accesses. ctest runs
#   cmake -DCUOBJDUMP=... -DLIBRARY=... -DARCHITECTURES="80-real;..." -DDEFINITIONS="Lltm;..."
#     -P check_cuda.cmake
cmake_minimum_required(VERSION 3.25)

function(output_of result)
  execute_process(${ARGN} OUTPUT_VARIABLE output COMMAND_ERROR_IS_FATAL ANY)
  # Special in lists.
  string(REGEX REPLACE "[][;]" "" output "${output}")
  string(REPLACE ";" "|" any_definition "${DEFINITIONS}")
  string(REGEX REPLACE "(lltm_[a-z_]*ward)IN[A-Za-z0-9_]*[0-9](${any_definition})ELi"
    "\\1I\\2ELi" output "${output}")
  set(${result} "${output}" PARENT_SCOPE)
endfunction()

# Mangled names without a cell's namespaces: lltm_forward<definition, width, T>,
# lltm_backward<definition, width, T, D>. A repeated c10 type becomes S6_.
set(kernels "")
foreach(definition IN LISTS DEFINITIONS)
  foreach(width_and_type
      "1EdE" "2EdE" "1EfE" "4EfE" "1EN3c104HalfEE" "8EN3c104HalfEE"
      "1EN3c108BFloat16EE" "8EN3c108BFloat16EE")
    list(APPEND kernels "lltm_forwardI${definition}ELi${width_and_type}")
  endforeach()
  foreach(width_and_types
      "1EddE" "2EddE" "1EffE" "4EffE" "1EN3c104HalfEfE" "8EN3c104HalfEfE"
      "1EN3c104HalfES6_E" "8EN3c104HalfES6_E" "1EN3c108BFloat16EfE" "8EN3c108BFloat16EfE"
      "1EN3c108BFloat16ES6_E" "8EN3c108BFloat16ES6_E")
    list(APPEND kernels "lltm_backwardI${definition}ELi${width_and_types}")
  endforeach()
endforeach()
list(LENGTH kernels expected)

function(instructions_of result kernel)
  string(FIND "${code}" "${kernel}" begin)
  string(SUBSTRING "${code}" ${begin} -1 body)
  string(FIND "${body}" "Function : " end)
  string(SUBSTRING "${body}" 0 ${end} body)
  set(${result} "${body}" PARENT_SCOPE)
endfunction()

foreach(architecture IN LISTS ARCHITECTURES)
  string(REGEX MATCH "^[0-9]+[a-z]?" sm "${architecture}")
  if(NOT architecture MATCHES "-virtual$")
    # Per function, a line with its name and a line with its resources.
    output_of(usage COMMAND ${CUOBJDUMP} --dump-resource-usage --gpu-architecture sm_${sm} "${LIBRARY}")
    foreach(kernel IN LISTS kernels)
      if(NOT usage MATCHES "Function [A-Za-z0-9_]*${kernel}[A-Za-z0-9_]*:[^\n]*\n([^\n]*)")
        message(SEND_ERROR "sm_${sm}: no kernel ${kernel}")
      elseif(NOT CMAKE_MATCH_1 MATCHES "STACK:0 .*LOCAL:0 ")
        message(SEND_ERROR "sm_${sm}: ${kernel} spills registers: ${CMAKE_MATCH_1}")
      endif()
    endforeach()
    # Reduces 100 MB to the checked instructions.
    output_of(code COMMAND ${CUOBJDUMP} --dump-sass --gpu-architecture sm_${sm} "${LIBRARY}"
      COMMAND grep -oE "Function : [A-Za-z0-9_]*|(LDG|STG)[.A-Z0-9]*")
    string(APPEND code "Function : ")
    foreach(kernel IN LISTS kernels)
      instructions_of(body "${kernel}E")
      if(NOT kernel MATCHES "ELi1E"
          AND (NOT body MATCHES "LDG[.A-Z]*[.]128" OR NOT body MATCHES "STG[.A-Z]*[.]128"))
        message(SEND_ERROR "sm_${sm}: ${kernel} has no 16-byte accesses")
      endif()
    endforeach()
    string(REGEX MATCHALL "Function [^\n]*" functions "${usage}")
    list(LENGTH functions found)
    if(NOT found EQUAL expected)
      message(SEND_ERROR "sm_${sm}: expected ${expected} kernels, got ${found}")
    endif()
  endif()
  if(NOT architecture MATCHES "-real$")
    output_of(ptx COMMAND ${CUOBJDUMP} --list-ptx "${LIBRARY}")
    if(NOT ptx MATCHES "sm_${sm}[.]ptx")
      message(SEND_ERROR "no PTX of compute_${sm}")
    endif()
  endif()
endforeach()
