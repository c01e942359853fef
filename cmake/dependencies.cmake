# What the build needs besides libtorch. Each is used as it is installed, else
# fetched: a pinned release, checked against its SHA-256. To build offline, give
# a folder of sources in FETCHCONTENT_SOURCE_DIR_<NAME>; it comes first.
#
#     lltm_require_nlohmann_json()   lltm_json             always (headers only)
#     lltm_require_googletest()      GTest::gtest          LLTM_TESTS
#     lltm_require_benchmark()       benchmark::benchmark  LLTM_BENCHMARKS
#
# None of them is part of the installed package.
include_guard(GLOBAL)

# Makes the sources of a release available, as FetchContent does, but says in
# one sentence what to do where they cannot be downloaded. Options of the
# subproject are variables of the caller; a SOURCE_SUBDIR that does not exist
# says that there is nothing to build.
function(_lltm_fetch name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "URL;SHA256;SOURCE_SUBDIR;INSTALL" "")
  include(FetchContent)
  string(TOUPPER ${name} upper)
  set(archive "${arg_URL}")
  if(NOT FETCHCONTENT_SOURCE_DIR_${upper} AND NOT FETCHCONTENT_FULLY_DISCONNECTED)
    get_filename_component(file "${arg_URL}" NAME)
    set(archive "${FETCHCONTENT_BASE_DIR}/${name}-${file}")
    set(hash "")
    if(EXISTS "${archive}")
      file(SHA256 "${archive}" hash)
    endif()
    if(NOT hash STREQUAL arg_SHA256)
      message(STATUS "lltm: ${name} from ${arg_URL}")
      file(DOWNLOAD "${arg_URL}" "${archive}" TLS_VERIFY ON INACTIVITY_TIMEOUT 30 STATUS status)
      list(POP_FRONT status code)
      if(NOT code EQUAL 0)
        file(REMOVE "${archive}")
        message(FATAL_ERROR
          "lltm: ${name} is missing: install it (${arg_INSTALL}), or set "
          "FETCHCONTENT_SOURCE_DIR_${upper} to a folder of its sources; "
          "${arg_URL} could not be downloaded (${status})")
      endif()
    endif()
  endif()
  set(subdir "")
  if(arg_SOURCE_SUBDIR)
    set(subdir SOURCE_SUBDIR ${arg_SOURCE_SUBDIR})
  endif()
  FetchContent_Declare(${name} SYSTEM URL "${archive}" URL_HASH SHA256=${arg_SHA256} ${subdir})
  FetchContent_MakeAvailable(${name})
  set(${name}_SOURCE_DIR "${${name}_SOURCE_DIR}" PARENT_SCOPE)
endfunction()

# The folder of the headers in the Python package nlohmann_json, if there is a
# Python and it has that package; else an empty string.
function(_lltm_json_of_python result)
  set(${result} "" PARENT_SCOPE)
  set(python "${Python_EXECUTABLE}")
  if(NOT python)
    find_program(LLTM_PYTHON_EXECUTABLE NAMES python3 python)
    set(python "${LLTM_PYTHON_EXECUTABLE}")
  endif()
  if(NOT python)
    return()
  endif()
  execute_process(
    COMMAND "${python}" -c
      "import importlib.util as u; print(u.find_spec('nlohmann_json').submodule_search_locations[0])"
    OUTPUT_VARIABLE folder OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(EXISTS "${folder}/include/nlohmann/json.hpp")
    set(${result} "${folder}/include" PARENT_SCOPE)
  endif()
endfunction()

function(lltm_require_nlohmann_json)
  if(TARGET lltm_json)
    return()
  endif()
  set(include_dirs "")
  if(NOT FETCHCONTENT_SOURCE_DIR_NLOHMANN_JSON)
    find_package(nlohmann_json 3.11 CONFIG QUIET)
    if(TARGET nlohmann_json::nlohmann_json)
      get_target_property(include_dirs
        nlohmann_json::nlohmann_json INTERFACE_INCLUDE_DIRECTORIES)
    else()
      _lltm_json_of_python(include_dirs)
    endif()
  endif()
  if(NOT include_dirs)
    _lltm_fetch(nlohmann_json
      URL https://github.com/nlohmann/json/releases/download/v3.12.0/json.tar.xz
      SHA256 42f6e95cad6ec532fd372391373363b62a14af6d771056dbfc86160e6dfff7aa
      SOURCE_SUBDIR nothing-to-build
      INSTALL "the Debian package nlohmann-json3-dev, or pip install nlohmann_json")
    set(include_dirs "${nlohmann_json_SOURCE_DIR}/include")
  endif()
  add_library(lltm_json INTERFACE)
  target_include_directories(lltm_json SYSTEM INTERFACE "$<BUILD_INTERFACE:${include_dirs}>")
endfunction()

function(lltm_require_googletest)
  if(NOT TARGET GTest::gtest AND NOT FETCHCONTENT_SOURCE_DIR_GOOGLETEST)
    find_package(GTest QUIET)
  endif()
  if(NOT TARGET GTest::gtest)
    set(BUILD_GMOCK OFF)
    set(INSTALL_GTEST OFF)
    _lltm_fetch(googletest
      URL https://github.com/google/googletest/archive/refs/tags/v1.15.2.tar.gz
      SHA256 7b42b4d6ed48810c5362c265a17faebe90dc2373c885e5216439d37927f02926
      INSTALL "the Debian package libgtest-dev")
  endif()
endfunction()

function(lltm_require_benchmark)
  if(NOT TARGET benchmark::benchmark AND NOT FETCHCONTENT_SOURCE_DIR_BENCHMARK)
    find_package(benchmark CONFIG QUIET)
  endif()
  if(NOT TARGET benchmark::benchmark)
    set(BENCHMARK_ENABLE_TESTING OFF)
    set(BENCHMARK_ENABLE_INSTALL OFF)
    set(BENCHMARK_ENABLE_WERROR OFF)
    set(BENCHMARK_INSTALL_DOCS OFF)
    set(BENCHMARK_INSTALL_TOOLS OFF)
    _lltm_fetch(benchmark
      URL https://github.com/google/benchmark/archive/refs/tags/v1.9.5.tar.gz
      SHA256 9631341c82bac4a288bef951f8b26b41f69021794184ece969f8473977eaa340
      INSTALL "the Debian package libbenchmark-dev")
  endif()
endfunction()
