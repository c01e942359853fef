# NAME is the test (CMakeLists.txt):
#   cmake -DPREFIX=... -DTORCH=... ... -P check.cmake NAME
cmake_minimum_required(VERSION 3.25)
math(EXPR last "${CMAKE_ARGC} - 1")
set(test "${CMAKE_ARGV${last}}")
set(here "${CMAKE_CURRENT_LIST_DIR}")
string(MD5 folder "${PREFIX}")
set(work "${LLTM_BUILD}/tests_cpp/packaging/${test}-${folder}")
file(REMOVE_RECURSE "${work}")
file(MAKE_DIRECTORY "${work}")

# The command must succeed; sets `output`.
macro(run)
  execute_process(COMMAND ${ARGN} WORKING_DIRECTORY "${work}"
    OUTPUT_VARIABLE output ERROR_VARIABLE output RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "${command}\nended with ${status}:\n${output}")
  endif()
endmacro()

unset(ENV{LD_LIBRARY_PATH})
macro(run_program)
  run(${ARGN})
  string(STRIP "${output}" output)
  if(NOT output STREQUAL "${VERSION}")
    message(FATAL_ERROR "expected ${VERSION} from ${ARGN}, got ${output}")
  endif()
endmacro()

macro(configure)
  run(${CMAKE_COMMAND} -G "${GENERATOR}" "-DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM}"
    "-DCMAKE_CXX_COMPILER=${CXX}" ${ARGN})
endmacro()

macro(expect_text what)
  foreach(text IN ITEMS ${ARGN})
    string(FIND "${${what}}" "${text}" found)
    if(found LESS 0)
      message(FATAL_ERROR "expected \"${text}\" in:\n${${what}}")
    endif()
  endforeach()
endmacro()

# As a user links; many compilers pass --as-needed.
set(include "${PREFIX}/include")
set(lib "${PREFIX}/${LIBDIR}")
set(compile ${LAUNCHER} "${CXX}" -std=c++20 -Wall -Wextra -Werror)
set(link "${CXX}" -Wl,--as-needed)

function(test_install)
  file(REMOVE_RECURSE "${PREFIX}")
  if(NOT RELOCATABLE)
    run(${CMAKE_COMMAND} --install "${LLTM_BUILD}" --prefix "${PREFIX}")
  else()
    run(${CMAKE_CPACK_COMMAND} --config "${LLTM_BUILD}/CPackConfig.cmake" -G TGZ -B "${work}")
    file(GLOB archive "${work}/*.tar.gz")
    file(ARCHIVE_EXTRACT INPUT "${archive}" DESTINATION "${work}")
    cmake_path(GET PREFIX PARENT_PATH parent)
    string(REGEX REPLACE "\\.tar\\.gz$" "" unpacked "${archive}")
    file(RENAME "${unpacked}" "${PREFIX}")
    file(CREATE_LINK "${TORCH}" "${parent}/libtorch" SYMBOLIC)
  endif()
endfunction()

# Expected file names, and no paths of this system in relocatable files.
function(test_contents)
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" minor "${VERSION}")
  file(GLOB_RECURSE files RELATIVE "${PREFIX}" "${PREFIX}/*")
  list(FILTER files EXCLUDE REGEX "/lltm-kernels/")  # LLTM_CUDA_EMBED
  list(SORT files)
  set(expected
    include/lltm/backends.h
    include/lltm/cell.h
    include/lltm/export.h
    include/lltm/lltm.h
    include/lltm/nn.h
    include/lltm/ops.h
    include/lltm/realtime.h
    include/lltm/serialize.h
    include/lltm/version.h
    ${LIBDIR}/cmake/lltm-realtime/lltm-realtime-config-release.cmake
    ${LIBDIR}/cmake/lltm-realtime/lltm-realtime-config-version.cmake
    ${LIBDIR}/cmake/lltm-realtime/lltm-realtime-config.cmake
    ${LIBDIR}/cmake/lltm/lltm-config-version.cmake
    ${LIBDIR}/cmake/lltm/lltm-config.cmake
    ${LIBDIR}/cmake/lltm/lltm-targets-release.cmake
    ${LIBDIR}/cmake/lltm/lltm-targets.cmake
    ${LIBDIR}/cmake/lltm/lltm-torch.cmake
    ${LIBDIR}/liblltm.so
    ${LIBDIR}/liblltm.so.${minor}
    ${LIBDIR}/liblltm_realtime.so
    ${LIBDIR}/liblltm_realtime.so.${minor}
    ${LIBDIR}/liblltm_realtime_static.a
    ${LIBDIR}/pkgconfig/lltm.pc
    share/licenses/lltm/LICENSE
    share/licenses/lltm/LICENSE-THIRD-PARTY)
  if(NOT files STREQUAL expected)
    message(FATAL_ERROR "expected ${expected}\ngot ${files}")
  endif()
  file(READ_SYMLINK "${lib}/liblltm.so" name)
  if(NOT name STREQUAL "liblltm.so.${minor}")
    message(FATAL_ERROR "liblltm.so is a link to ${name}")
  endif()
  # The folders of libtorch and CUDA are allowed.
  cmake_path(GET TORCH PARENT_PATH site)
  foreach(file IN LISTS files)
    file(STRINGS "${PREFIX}/${file}" lines REGEX "${LLTM_SOURCE}|${site}")
    if(NOT RELOCATABLE)
      string(REPLACE "${site}" "" lines "${lines}")
    endif()
    if(lines MATCHES "${LLTM_SOURCE}|${site}")
      list(APPEND leaks "${file}: ${lines}")
    endif()
  endforeach()
  if(leaks)
    list(JOIN leaks "\n" leaks)
    message(FATAL_ERROR "these files contain paths of this system:\n${leaks}")
  endif()
endfunction()

function(test_flags)
  run(${compile} -c "${here}/small.cpp" -o small.o "-I${include}")
  run(${link} small.o -o small "-L${lib}" "-Wl,-rpath,${lib}" -llltm)
  run_program("${work}/small")
  run(${link} small.o -o named "-L${lib}" "-L${TORCH}/lib" "-Wl,-rpath,${lib}:${TORCH}/lib"
    -llltm -ltorch_cpu -lc10)
  run_program("${work}/named")
endfunction()

function(link_by_pkg_config folder)
  find_program(pkg_config NAMES pkg-config pkgconf REQUIRED)
  set(ENV{PKG_CONFIG_PATH} "${folder}")
  run("${pkg_config}" --modversion lltm)
  run("${pkg_config}" --cflags lltm)
  separate_arguments(cflags UNIX_COMMAND "${output}")
  run("${pkg_config}" --libs lltm)
  separate_arguments(libs UNIX_COMMAND "${output}")
  foreach(program small load)
    run(${compile} ${cflags} -c "${here}/${program}.cpp" -o ${program}.o)
    run(${link} ${program}.o -o ${program} ${libs})
  endforeach()
endfunction()

function(test_pkg_config)
  link_by_pkg_config("${lib}/pkgconfig")
  run_program("${work}/small")
  run_program("${work}/load")
endfunction()

function(test_dlopen)
  run(${compile} "${here}/load.cpp" -o load -ldl)
  run_program("${work}/load" "${lib}/liblltm.so")
endfunction()

# Loading the libraries, with the environment, must fail with exactly this message.
function(expect_load_error expected environment)
  run(${compile} "${here}/load.cpp" -o load -ldl)
  execute_process(COMMAND ${CMAKE_COMMAND} -E env ${environment} "${work}/load" ${ARGN}
    OUTPUT_VARIABLE output ERROR_VARIABLE output RESULT_VARIABLE status)
  if(NOT status EQUAL 1 OR NOT output STREQUAL expected)
    message(FATAL_ERROR "expected status 1 and\n${expected}got ${status} and\n${output}")
  endif()
endfunction()

# With another libtorch release at run time.
function(test_other_libtorch)
  run(${compile} -shared -fPIC "${here}/other_libtorch.cpp" -o libother.so)
  expect_load_error("lltm: liblltm was built for libtorch ${TORCH_MINOR} and cannot run with libtorch \
2.99.1 (${work}/libother.so): run it with libtorch ${TORCH_MINOR}, or build lltm again for this \
libtorch\n" "LD_PRELOAD=${work}/libother.so" "${lib}/liblltm.so")
endfunction()

# With a second copy in the process.
function(test_second_copy)
  file(GLOB library "${lib}/liblltm.so*")
  file(COPY ${library} DESTINATION "${work}/second")
  expect_load_error("lltm: ${work}/second/liblltm.so cannot be loaded together with ${lib}/liblltm.so: \
both register the operators lltm::*, and a process has one registry; load one of them\n"
    "" "${lib}/liblltm.so" "${work}/second/liblltm.so")
endfunction()

# Without libtorch: a program of an example, which links the static library.
function(test_realtime)
  set(example "${LLTM_SOURCE}/examples/amplifier")
  configure(-S "${example}" -B amplifier "-DCMAKE_PREFIX_PATH=${PREFIX}" -DCMAKE_BUILD_TYPE=Release)
  run(${CMAKE_COMMAND} --build amplifier)
  run(readelf --dynamic --wide "${lib}/liblltm_realtime.so")
  string(REGEX MATCHALL "NEEDED[^[]*.[^]]*" needed "${output}")
  foreach(library IN LISTS needed)
    if(NOT library MATCHES "lib(stdc\\+\\+|m|gcc_s|c)\\.so|ld-linux")
      message(FATAL_ERROR "liblltm_realtime needs ${library}")
    endif()
  endforeach()
  file(SIZE "${lib}/liblltm_realtime.so" bytes)
  if(bytes GREATER 3000000)
    message(FATAL_ERROR "liblltm_realtime.so has ${bytes} bytes")
  endif()
endfunction()

function(build_siblings prefix)
  # lltm-torch.cmake must ignore the project's variables.
  configure(-S "${here}/siblings" -B siblings "-DCMAKE_PREFIX_PATH=${prefix}"
    -Dconfig=Release -Dlibrary=none -Dpython=none)
  run(${CMAKE_COMMAND} --build siblings)
  run_program("${work}/siblings/one/one")
  run_program("${work}/siblings/two/two")
endfunction()

function(test_siblings)
  build_siblings("${PREFIX}")
endfunction()

# Looks like libtorch 2.10.
function(make_other_torch folder)
  file(WRITE "${folder}/share/cmake/Torch/TorchConfig.cmake" "")
  file(WRITE "${folder}/include/torch/headeronly/version.h"
    "#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 10\n#define TORCH_VERSION_PATCH 0\n")
  foreach(name torch torch_cpu c10)
    file(WRITE "${folder}/lib/lib${name}.so" "")
  endforeach()
endfunction()

function(write_project arguments)
  file(WRITE "${work}/project/CMakeLists.txt"
    "cmake_minimum_required(VERSION 3.25)\nproject(finder LANGUAGES CXX)\n"
    "find_package(lltm CONFIG ${arguments})\n"
    "set(torch none)\n"
    "if(lltm_FOUND)\n  get_target_property(torch lltm::torch LLTM_TORCH_ROOT)\nendif()\n"
    "message(\"torch: \${torch}\")\n")
endfunction()

# Without a matching libtorch, or with a component, lltm is not found; QUIET prints nothing. lltm itself
# refuses a libtorch that it does not support.
function(test_not_found)
  make_other_torch("${work}/other")
  file(MAKE_DIRECTORY "${work}/empty/share/cmake/Torch" "${work}/empty/lib")
  file(TOUCH "${work}/empty/share/cmake/Torch/TorchConfig.cmake")
  set(reason_other "built for torch ${TORCH_MINOR}, but torch 2.10.0")
  set(reason_empty "expected libtorch 2.11 or later in")
  foreach(torch other empty)
    write_project(QUIET)
    configure(-S project -B "build_${torch}" "-DCMAKE_PREFIX_PATH=${PREFIX}" "-DTorch_ROOT=${work}/${torch}")
    expect_text(output "torch: none")
    string(FIND "${output}" "${reason_${torch}}" found)
    if(NOT found LESS 0)
      message(FATAL_ERROR "QUIET, but:\n${output}")
    endif()
    write_project("")
    configure(-S project -B "build_${torch}" "-DCMAKE_PREFIX_PATH=${PREFIX}" "-DTorch_ROOT=${work}/${torch}")
    string(REGEX REPLACE "[ \n]+" " " output "${output}")
    expect_text(output "${reason_${torch}}" "torch: none")
  endforeach()
  write_project("COMPONENTS cpu OPTIONAL_COMPONENTS cuda")
  configure(-S project -B build_components "-DCMAKE_PREFIX_PATH=${PREFIX};${TORCH}")
  expect_text(output "lltm has no component cpu; link the target lltm::lltm" "torch: none")
  write_project("OPTIONAL_COMPONENTS cuda")
  configure(-S project -B build_components "-DCMAKE_PREFIX_PATH=${PREFIX};${TORCH}")
  expect_text(output "torch: ${TORCH}")
  execute_process(
    COMMAND ${CMAKE_COMMAND} -S "${LLTM_SOURCE}" -B "${work}/refused" "-DTorch_ROOT=${work}/other"
    ERROR_VARIABLE output OUTPUT_QUIET RESULT_VARIABLE status)
  string(REGEX REPLACE "[ \n]+" " " output "${output}")
  expect_text(output "lltm: expected libtorch 2.11 or later, before " ", got 2.10.0 in ${work}/other")
endfunction()

# Another CMAKE_PREFIX_PATH in a later configuration selects another libtorch.
function(test_changed_torch)
  write_project("")
  set(lltm "-Dlltm_DIR=${lib}/cmake/lltm")
  make_other_torch("${work}/other")
  configure(-S project -B build "${lltm}" "-DCMAKE_PREFIX_PATH=${TORCH}")
  expect_text(output "torch: ${TORCH}")
  configure(-S project -B build "${lltm}" "-DCMAKE_PREFIX_PATH=${work}/other")
  expect_text(output "torch: none" "${work}/other")
  configure(-S project -B build "${lltm}" "-DCMAKE_PREFIX_PATH=${TORCH}/share/cmake")
  expect_text(output "torch: ${TORCH}")
endfunction()

macro(configure_subproject)
  configure(-S "${here}/subproject" -B build "-DLLTM_SOURCE=${LLTM_SOURCE}"
    "-DTorch_ROOT=${TORCH}/share/cmake/Torch" ${ARGN})
endmacro()

function(test_configure_subproject)
  configure_subproject()
  expect_text(output "ignoring BUILD_SHARED_LIBS=OFF: liblltm must be a shared library" "unchanged")
endfunction()

# The routes of C++ users (docs/install.md): a prefix, and FetchContent. Compiler and options are those
# of this build, so that ccache reuses objects of the kernels.
set(as_this_build "-DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER}"
  "-DCMAKE_COMPILE_WARNING_AS_ERROR=${WARNING_AS_ERROR}" "-DCMAKE_UNITY_BUILD=${UNITY}")
function(test_build_prefix)
  configure(-S "${LLTM_SOURCE}" -B build "-DCMAKE_PREFIX_PATH=${TORCH}" ${as_this_build})
  run(${CMAKE_COMMAND} --build build --parallel 2)
  run(${CMAKE_COMMAND} --install build --prefix "${work}/prefix")
  build_siblings("${work}/prefix")
endfunction()

# The parent's install step installs only its program.
function(test_build_subproject)
  configure_subproject(-DCMAKE_BUILD_TYPE=Release ${as_this_build})
  run(${CMAKE_COMMAND} --build build --parallel 2)
  run_program("${work}/build/app")
  run(${CMAKE_COMMAND} --install build --prefix "${work}/prefix")
  file(GLOB_RECURSE files RELATIVE "${work}/prefix" "${work}/prefix/*")
  if(NOT files STREQUAL "bin/app")
    message(FATAL_ERROR "expected only bin/app, got ${files}")
  endif()
endfunction()

# A parent's flags change no result, and do not flush subnormal numbers in every program that loads
# the library.
function(test_build_fast_math)
  set(flags -DCMAKE_CXX_FLAGS=-Ofast -DLLTM_CPU_KERNELS=native)
  configure_subproject(-DCMAKE_UNITY_BUILD=ON ${flags})
  run(${CMAKE_COMMAND} --build build --parallel 2 --target numbers)
  run("${work}/build/numbers")
  file(GLOB_RECURSE library "${work}/build/liblltm.so")
  file(STRINGS "${library}" constructor REGEX "set_fast_math")
  if(constructor)
    message(FATAL_ERROR "${library} contains ${constructor} of crtfastmath.o")
  endif()
  configure(-S "${LLTM_SOURCE}" -B kernels -DLLTM_KERNELS_ONLY=ON
    -DCMAKE_BUILD_TYPE=Debug ${flags})
  run(${CMAKE_COMMAND} --build kernels --parallel 2)
  run(${CMAKE_CTEST_COMMAND} --test-dir kernels --label-exclude slow --output-on-failure)
endfunction()

# The archive's files, in /opt/lltm.
function(test_debian)
  run(${CMAKE_CPACK_COMMAND} --config "${LLTM_BUILD}/CPackConfig.cmake" -G DEB -B "${work}")
  foreach(package lltm lltm-dev)
    file(GLOB deb "${work}/${package}_*.deb")
    run(dpkg-deb --info "${deb}")
    expect_text(output "Package: ${package}\n" "Version: ${VERSION}+torch${TORCH_MINOR}"
      "Needs libtorch ${TORCH_MINOR}")
    run(dpkg-deb --extract "${deb}" "${work}/root")
  endforeach()
  file(GLOB_RECURSE files RELATIVE "${work}/root/opt/lltm" "${work}/root/opt/*")
  file(GLOB_RECURSE expected RELATIVE "${PREFIX}" "${PREFIX}/*")
  if(NOT files STREQUAL expected)
    message(FATAL_ERROR "expected ${expected}\ngot ${files}")
  endif()

  # Built with lltm-dev, run with only lltm installed.
  set(root "${work}/root/opt")
  file(CREATE_LINK "${TORCH}" "${root}/libtorch" SYMBOLIC)
  link_by_pkg_config("${root}/lltm/lib/pkgconfig")
  file(REMOVE_RECURSE "${root}/lltm")
  file(GLOB deb "${work}/lltm_*.deb")
  run(dpkg-deb --extract "${deb}" "${work}/root")
  run_program("${work}/small")
endfunction()

function(test_lintian)
  run(${CMAKE_CPACK_COMMAND} --config "${LLTM_BUILD}/CPackConfig.cmake" -G DEB -B "${work}")
  file(GLOB packages "${work}/*.deb")
  run("${LINTIAN}" --fail-on=error,warning ${packages})
endfunction()

cmake_language(CALL "test_${test}")
