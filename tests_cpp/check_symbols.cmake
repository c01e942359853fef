# What liblltm exports and needs, and that no code for a newer CPU can leak out
# of the files compiled for it. Run by ctest with
#   cmake -DNM=... -DREADELF=... -DLIBRARY=... -DOBJECTS=a.o;b.o -P check_symbols.cmake

function(lines_of result)
  execute_process(COMMAND ${ARGN} OUTPUT_VARIABLE output COMMAND_ERROR_IS_FATAL ANY)
  string(REPLACE "[abi:cxx11]" "" output "${output}")
  # Brackets and semicolons mean something in lists.
  string(REGEX REPLACE "[][;]" "" output "${output}")
  string(STRIP "${output}" output)
  string(REPLACE "\n" ";" output "${output}")
  set(${result} "${output}" PARENT_SCOPE)
endfunction()

# The public API, name by name: a new function is added here when it is added
# to a header.
set(functions
  "lltm::(cell|sequence|prepack|sequence_prepacked|version|build_info|cpu_kernels)\\("
  "lltm::(load|save)_(safetensors|state_dict)\\("
  "lltm::composite::(forward|backward)\\("  # the pair that the Python module binds
  "lltm::LLTM(Cell)?(Options|Impl)::"
  "lltm::PrepackedLLTM::")
set(classes "(vtable|VTT|typeinfo|typeinfo name) for lltm::LLTM(Cell)?(Options|Impl)$")
list(JOIN functions "|" functions)

lines_of(exported ${NM} -D --defined-only --demangle "${LIBRARY}")
list(LENGTH exported count)
if(count LESS 10)
  message(SEND_ERROR "only ${count} symbols are exported: is this liblltm?")
endif()
foreach(line IN LISTS exported)
  string(REGEX REPLACE "^[0-9a-f]+ [A-Za-z] " "" symbol "${line}")
  if(NOT symbol MATCHES "^(${functions})" AND NOT symbol MATCHES "^${classes}")
    message(SEND_ERROR "exported, but not public API: ${line}")
  endif()
endforeach()

lines_of(dynamic ${READELF} --dynamic --wide "${LIBRARY}")
set(needed ${dynamic})
list(FILTER needed INCLUDE REGEX "\\(NEEDED\\)")
if(NOT needed MATCHES "libtorch_cpu")
  message(SEND_ERROR "no libtorch_cpu among the libraries needed: ${needed}")
endif()
foreach(line IN LISTS needed)
  if(line MATCHES "python")
    message(SEND_ERROR "liblltm needs Python: ${line}")
  endif()
  if(line MATCHES "omp" AND NOT line MATCHES "libgomp")
    message(SEND_ERROR "liblltm needs another OpenMP runtime than libtorch: ${line}")
  endif()
endforeach()

# A weak symbol of one file may stand for that of all: here, code for AVX-512
# for that of the baseline. So each file defines its table and nothing else
# that others can see.
foreach(object IN LISTS OBJECTS)
  lines_of(symbols ${NM} --demangle --extern-only --defined-only "${object}")
  foreach(line IN LISTS symbols)
    if(NOT line MATCHES " T lltm::cpu::kernels_[a-z0-9]+\\(\\)$")
      message(SEND_ERROR "${object} defines: ${line}")
    endif()
  endforeach()
  if(NOT symbols)
    message(SEND_ERROR "${object} defines nothing")
  endif()
endforeach()
