# What liblltm exports and needs, and that no code for a newer CPU can leak out
# of the files compiled for it. Run by ctest with
#   cmake -DNM=... -DREADELF=... -DLIBRARY=... -DEXPECTED=... -DOBJECTS=a.o;b.o
#     -P check_symbols.cmake
cmake_minimum_required(VERSION 3.25)

function(lines_of result)
  execute_process(COMMAND ${ARGN} OUTPUT_VARIABLE output COMMAND_ERROR_IS_FATAL ANY)
  string(REPLACE "[abi:cxx11]" "" output "${output}")
  # Brackets and semicolons mean something in lists.
  string(REGEX REPLACE "[][;]" "" output "${output}")
  string(STRIP "${output}" output)
  string(REPLACE "\n" ";" output "${output}")
  set(${result} "${output}" PARENT_SCOPE)
endfunction()

lines_of(exported ${NM} -D --defined-only --demangle "${LIBRARY}")
list(TRANSFORM exported REPLACE "^[0-9a-f]+ [A-Za-z] " "")
list(REMOVE_DUPLICATES exported)  # a constructor is two functions
file(STRINGS "${EXPECTED}" expected REGEX "^[^#]")
foreach(symbol IN LISTS exported)
  if(NOT symbol IN_LIST expected)
    message(SEND_ERROR "exported, but not in ${EXPECTED}: ${symbol}")
  endif()
endforeach()
foreach(symbol IN LISTS expected)
  if(NOT symbol IN_LIST exported)
    message(SEND_ERROR "not exported: ${symbol}")
  endif()
endforeach()

lines_of(dynamic ${READELF} --dynamic --wide "${LIBRARY}")
set(needed ${dynamic})
list(FILTER needed INCLUDE REGEX "\\(NEEDED\\)")
if(NOT needed MATCHES "libtorch_cpu")
  message(SEND_ERROR "no libtorch_cpu among the libraries needed: ${needed}")
endif()
if(dynamic MATCHES "BIND_NOW|NOW PIE|Flags: NOW")
  message(SEND_ERROR "liblltm binds at load, before it can compare libtorch's version: ${dynamic}")
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
