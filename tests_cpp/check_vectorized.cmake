# Checks that every instruction of a cell program (cell/program.h) compiles to full-width vector
# code, without scalar arithmetic. In float64, sin, cos and fmod call the C library. ctest runs
#   cmake -DNM=... -DOBJDUMP=... -DOBJECTS=default.cpp.o;avx2.cpp.o;... -P check_vectorized.cmake
cmake_minimum_required(VERSION 3.25)

set(arithmetic "(add|sub|mul|div|sqrt|min|max|f[n]?m(add|sub)[0-9]+)")

# Lines that match `pattern`, but not `exception`.
function(find_lines result code pattern exception)
  string(REGEX MATCHALL "[^\n]*\t${pattern}[^\n]*" lines "${code}")
  if(exception)
    list(FILTER lines EXCLUDE REGEX "${exception}")
  endif()
  set(${result} "${lines}" PARENT_SCOPE)
endfunction()

foreach(object IN LISTS OBJECTS)
  if(object MATCHES "(avx512|amx)\\.cpp")
    set(width zmm)
  elseif(object MATCHES "avx2\\.cpp")
    set(width ymm)
  elseif(object MATCHES "default\\.cpp")
    set(width xmm)
  else()
    continue()  # runs no programs
  endif()
  execute_process(COMMAND ${NM} "${object}" OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[^\n]+" names "${symbols}")
  list(LENGTH names count)
  if(count LESS_EQUAL 2)
    continue()  # without its flags, a file has no kernels
  endif()
  # execute<float, 64> and the other three; compilers append suffixes.
  string(REGEX MATCHALL "_ZN4lltm3cpu[A-Za-z0-9_]*7executeI[fd]Ll[0-9]+E[A-Za-z0-9_.]*"
    functions "${symbols}")
  list(LENGTH functions count)
  if(NOT count EQUAL 4)
    message(SEND_ERROR "${object}: expected 4 functions that run programs, got: ${functions}")
  endif()
  foreach(function IN LISTS functions)
    execute_process(
      COMMAND ${OBJDUMP} -dr --no-show-raw-insn "--disassemble=${function}" "${object}"
      OUTPUT_VARIABLE code COMMAND_ERROR_IS_FATAL ANY)
    string(REPLACE ";" "" code "${code}")
    if(function MATCHES "executeId")
      string(REGEX REPLACE "\tcall[^\n]*\n[^\n]*R_X86_64_PLT32\t(sin|cos|fmod)-" "" code "${code}")
    endif()
    foreach(needed "v?sqrtp[sd]" "v?divp[sd]" "v?maxp[sd]|v?cmp[a-z_]*p[sd]")
      if(NOT code MATCHES "\t(${needed}) ")
        message(SEND_ERROR "${object}: ${function} has no ${needed}")
      endif()
    endforeach()
    find_lines(scalar "${code}" "v?[a-z0-9]+s[sd] " "\tv?(mov|broadcast)s[sd] ")
    find_lines(narrow "${code}" "v?${arithmetic}p[sd] " "%${width}")
    # Values in general registers. Stores to the stack are pointers.
    find_lines(general "${code}" "mov[lq]? +%[er][a-z0-9]+,[^%]*\\(%" "\\(%rsp|\\(%rbp")
    find_lines(calls "${code}" "call" "")
    foreach(problem scalar narrow general calls)
      if(${problem})
        list(JOIN ${problem} "\n" lines)
        message(SEND_ERROR "${object}: ${function}: ${problem} instructions:\n${lines}")
      endif()
    endforeach()
  endforeach()
endforeach()
