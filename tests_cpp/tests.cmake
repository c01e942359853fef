# The tests, one per line: name, program, filter of GoogleTest cases, then
#   ISA name     ATEN_CPU_CAPABILITY, which selects the kernels of lltm and ATen; "native": the best
#   THREADS n    of OpenMP. Waiting threads always sleep, because tests share the CPUs. MKL has one:
#                it would wake a second one for each of many small float64 GEMMs.
#   ENV ...      other environment variables
#   PARTS n      divides the cases over the tests name.0 and so on
#   ALWAYS part  the other parts have the label `slow`
#   SLOW         has the label `slow`
#   GPU          has the label `gpu`: only the presets cuda and gpu build the program
#   TIMEOUT s
# Lines whose program is not part of the build are skipped.
function(lltm_test name program filter)
  cmake_parse_arguments(PARSE_ARGV 3 arg "SLOW;GPU" "ISA;THREADS;PARTS;ALWAYS;TIMEOUT" "ENV")
  if(NOT TARGET ${program})
    return()
  endif()
  set(parts ${name})
  if(arg_PARTS)
    math(EXPR last "${arg_PARTS} - 1")
    set(parts "")
    foreach(part RANGE ${last})
      list(APPEND parts ${name}.${part})
    endforeach()
  endif()
  set(common OMP_WAIT_POLICY=set:PASSIVE ${arg_ENV})
  if(arg_ISA STREQUAL native)
    list(APPEND common ATEN_CPU_CAPABILITY=unset:)
  elseif(arg_ISA)
    list(APPEND common ATEN_CPU_CAPABILITY=set:${arg_ISA})
  endif()
  if(arg_THREADS)
    list(APPEND common OMP_NUM_THREADS=set:${arg_THREADS} MKL_NUM_THREADS=set:1)
  endif()
  foreach(test IN LISTS parts)
    set(environment ${common})
    string(REGEX MATCH "[0-9]+$" part "${test}")
    if(arg_PARTS)
      list(APPEND environment
        GTEST_TOTAL_SHARDS=set:${arg_PARTS} GTEST_SHARD_INDEX=set:${part})
    endif()
    add_test(NAME ${test} COMMAND ${program} --gtest_brief=1 "--gtest_filter=${filter}")
    set_tests_properties(${test} PROPERTIES
      ENVIRONMENT_MODIFICATION "${environment}"
      FAIL_REGULAR_EXPRESSION "0 tests from 0 test suites ran"
      SKIP_RETURN_CODE 77)
    if(arg_SLOW OR (DEFINED arg_ALWAYS AND NOT part EQUAL arg_ALWAYS))
      set_tests_properties(${test} PROPERTIES LABELS slow)
    endif()
    if(arg_GPU)
      set_tests_properties(${test} PROPERTIES LABELS gpu)
    endif()
    if(arg_TIMEOUT)
      set_tests_properties(${test} PROPERTIES TIMEOUT ${arg_TIMEOUT})
    endif()
  endforeach()
endfunction()

# ---- Kernels, without libtorch ----------------------------------------------

set(bf16x3 "*Bf16x3*:AmxEmulation*")
set(program_text "CellText.*:CellCode.*:CellErrors.*")
set(schedule "Schedule.*:CostModel.*:ChooseEngine.*")
string(JOIN ":" others
  "${bf16x3}" "*ElementwiseKernels*" "*F32*" "*FormatsOfGemm*" "*Int8*"
  "${program_text}" "${schedule}")
set(emulated)
if(CMAKE_CROSSCOMPILING)  # with a long double in software
  set(emulated TIMEOUT 3600)
endif()
lltm_test(cell_math      lltm_kernel_tests "-${others}" ${emulated})
lltm_test(bf16x3         lltm_kernel_tests "${bf16x3}")
lltm_test(f32            lltm_kernel_tests "*F32*")
lltm_test(elementwise    lltm_kernel_tests "*ElementwiseKernels*")
lltm_test(formats        lltm_kernel_tests "*FormatsOfGemm*")
lltm_test(int8           lltm_kernel_tests "*Int8*")
lltm_test(program_text   lltm_kernel_tests "${program_text}")
lltm_test(schedule       lltm_kernel_tests "${schedule}")
lltm_test(realtime       lltm_realtime_tests "*")

# ---- Library ----------------------------------------------------------------

# Seven parts: properties have at least 16 combinations, a multiple of 8, so that every part has
# different cells, dtypes and directions of each property.
set(in_parts PARTS 7 ALWAYS 0)
set(long)
if(sanitized)  # takes ten times as long
  set(long ${in_parts})
endif()

set(operators "Cell*:*/Cell*:Sequence*:*/Sequence*:Isa*")
# Values and first gradients of every engine.
string(JOIN ":" numeric
  "*/CellAccuracy.*" "*/SequenceAccuracy.*" "*/SequencePacked.*" "*Dtype.*Oracle*"
  "Cell*/Properties.Matches*" "Sequence*/Properties.Matches*" "Sequence*/Properties.NonFinite*"
  "Sequence*/SequenceProperties.PackedSequences*" "Cell*/GradientProperties.OfLarge*"
  "Sequence*/GradientProperties.OfLarge*" "Isa*-*WithResets*")
# GEMMs that differ with AMX: bfloat16, and bf16x3 in sequences.
set(amx "${numeric}:*/float64*:*_float64*:*/Cell*_float32*:*/Cell*_float16*:*Int8/*:Isa*")
# At -O1, multiplication and addition are not fused: overflow differs from the reference.
set(tsan "*Sequence*float32*:*Sequence*float16*-*bfloat16*:*Beyond32Bits*:*OverflowingGemms*")
string(JOIN ":" combinations
  "Sequence*/Properties.*" "Sequence*/SequenceProperties.*" "Sequence*/GradientProperties.*"
  "Sequence*/HostProperties.*" "Sizes/*Accuracy.*" "Lengths/*" "Dtypes*/Sequence*Dtype.*")
lltm_test(library                lltm_tests "-${operators}")
lltm_test(operators.native       lltm_tests "${operators}-${combinations}" ISA native THREADS 2 ${long})
lltm_test(operators.native_combinations
                                 lltm_tests "${combinations}" ISA native THREADS 2 ${in_parts})
# Each instruction set always runs another part.
lltm_test(operators.default      lltm_tests "${numeric}" ISA default THREADS 1 PARTS 7 ALWAYS 0)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  lltm_test(operators.avx2       lltm_tests "${numeric}" ISA avx2 THREADS 1 PARTS 7 ALWAYS 1)
  lltm_test(operators.avx512     lltm_tests "${numeric}" ISA avx512 THREADS 1 PARTS 7 ALWAYS 2)
endif()
lltm_test(operators.emulated_amx lltm_emulated_tests "${amx}" ISA avx512 THREADS 2
                                 ENV LLTM_EMULATED_AMX=set:1 ${in_parts})
lltm_test(operators.tsan         lltm_tsan_tests "${tsan}" ISA avx512 THREADS 3 SLOW TIMEOUT 3600
                                 ENV LLTM_EMULATED_AMX=set:1)
lltm_test(engines                lltm_engine_tests "*-IdleTeam.*" THREADS 7)
lltm_test(idle_team              lltm_engine_tests "IdleTeam.*" ENV GOMP_SPINCOUNT=set:30000000)
lltm_test(engines.emulated_amx   lltm_engine_tests "-*Int8*:IdleTeam.*" ENV LLTM_EMULATED_AMX=set:1
                                 ISA avx512 THREADS 2 ${in_parts})

# ---- The CUDA backend, on the CPU and on a GPU ------------------------------

string(JOIN ":" cuda_combinations
  "*/Properties.*" "*/SequenceProperties.*" "*/GradientProperties.*" "*/HostProperties.*"
  "Cuda*/Cuda*.*" "Cells/PersistentEngine.*" "Texts/*")
lltm_test(ptx                       lltm_ptx_tests "*" GPU)  # here: not built by other presets
lltm_test(cuda_on_host              lltm_cuda_host_tests "-Slow*:${cuda_combinations}")
lltm_test(cuda_on_host.combinations lltm_cuda_host_tests "${cuda_combinations}-Slow*" ${in_parts})
lltm_test(cuda_on_host.slow         lltm_cuda_host_tests "Slow*" PARTS 3 SLOW TIMEOUT 3600)
lltm_test(cuda_on_host.schedule     lltm_cuda_host_tests "PersistentSchedule.*"
  ENV LLTM_SCHEDULE=set:1)
lltm_test(cuda                      lltm_cuda_tests "*" PARTS 8 GPU)  # skipped without a GPU
lltm_test(nvrtc                     lltm_nvrtc_tests "*" PARTS 2 GPU)

if(TEST cuda_on_host.schedule)
  string(JOIN "[^\n]*\n" schedules
    "lltm: N=57 B=19 I=4 H=16, on CUDA, forward: persistent, 2 groups of 16 rows"
    "lltm: N=57 B=19 I=4 H=16, on CUDA, backward: persistent, 2 groups of 16 rows"
    "lltm: N=57 B=19 I=4 H=16, on CUDA, forward: per-step .lltm.backends.cuda.persistent is False.")
  set_tests_properties(cuda_on_host.schedule PROPERTIES PASS_REGULAR_EXPRESSION "${schedules}")
  # Most presets build neither these tests nor run them.
  set_property(TEST cuda_on_host cuda_on_host.combinations.0 cuda_on_host.schedule
    APPEND PROPERTY LABELS on_host)
endif()

# ---- Contents of the binaries -----------------------------------------------

if(NOT TARGET lltm)
  return()
endif()
set(binaries
  "-DNM=${CMAKE_NM}" "-DLIBRARY=$<TARGET_FILE:lltm>" "-DOBJECTS=$<TARGET_OBJECTS:lltm_cpu_kernels>")
if(CMAKE_NM AND CMAKE_READELF)
  # Later options win.
  set(realtime "$<FILTER:$<TARGET_OBJECTS:lltm_realtime_objects>,INCLUDE,/isa/>")
  add_test(NAME symbols COMMAND ${CMAKE_COMMAND} ${binaries}
    "-DOBJECTS=$<TARGET_OBJECTS:lltm_cpu_kernels>;${realtime}" "-DREADELF=${CMAKE_READELF}"
    "-DEXPECTED=${CMAKE_CURRENT_SOURCE_DIR}/exported_symbols.txt"
    -P "${CMAKE_CURRENT_SOURCE_DIR}/check_symbols.cmake")
else()
  message(STATUS "lltm: nm or readelf not found; symbols are not tested")
endif()
# With Clang, CMAKE_OBJDUMP may be LLVM's, which has other options.
find_program(LLTM_GNU_OBJDUMP NAMES objdump)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64" AND CMAKE_NM AND LLTM_GNU_OBJDUMP
    AND LLTM_KERNEL_FLAGS MATCHES "-O3" AND NOT sanitized)
  add_test(NAME vectorized COMMAND ${CMAKE_COMMAND} ${binaries} "-DOBJDUMP=${LLTM_GNU_OBJDUMP}"
    -P "${CMAKE_CURRENT_SOURCE_DIR}/check_vectorized.cmake")
endif()
