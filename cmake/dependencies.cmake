# Build dependencies other than libtorch, not part of the installed package. FetchContent uses the
# installed version or downloads a pinned release. Offline builds set FETCHCONTENT_SOURCE_DIR_<NAME>
# to a folder with the sources, which has priority.
#
#     lltm_require_nlohmann_json()   nlohmann_json::nlohmann_json   always (headers only)
#     lltm_require_googletest()      GTest::gtest                   LLTM_TESTS
include_guard(GLOBAL)
include(FetchContent)

# Without the dependency and a network, CMake's error follows this message. Further arguments go to
# FetchContent_Declare.
function(_lltm_require name url sha256 install)
  string(TOUPPER ${name} upper)
  message(STATUS "lltm: looking for ${name} in FETCHCONTENT_SOURCE_DIR_${upper}, then "
    "installed (${install}), then downloading ${url}")
  # SYSTEM must be first: CMake 3.25 appends it to the value of the preceding option.
  FetchContent_Declare(${name} SYSTEM URL "${url}" URL_HASH SHA256=${sha256}
    DOWNLOAD_EXTRACT_TIMESTAMP ON LOG_DOWNLOAD ON ${ARGN})
  set(CMAKE_COMPILE_WARNING_AS_ERROR OFF)
  set(CMAKE_UNITY_BUILD OFF)
  FetchContent_MakeAvailable(${name})
endfunction()

# From sources, uses only the headers; nothing is built.
function(lltm_require_nlohmann_json)
  _lltm_require(nlohmann_json
    https://github.com/nlohmann/json/releases/download/v3.12.0/json.tar.xz
    42f6e95cad6ec532fd372391373363b62a14af6d771056dbfc86160e6dfff7aa
    "Debian: nlohmann-json3-dev; pip: nlohmann_json"
    SOURCE_SUBDIR nothing-to-build FIND_PACKAGE_ARGS 3.11 MODULE QUIET GLOBAL)
  if(NOT TARGET nlohmann_json::nlohmann_json)
    FetchContent_GetProperties(nlohmann_json SOURCE_DIR folder)
    add_library(nlohmann_json::nlohmann_json INTERFACE IMPORTED GLOBAL)
    target_include_directories(nlohmann_json::nlohmann_json INTERFACE "${folder}/include")
  endif()
endfunction()

function(lltm_require_googletest)
  set(BUILD_GMOCK OFF)
  set(INSTALL_GTEST OFF)
  _lltm_require(googletest
    https://github.com/google/googletest/archive/refs/tags/v1.15.2.tar.gz
    7b42b4d6ed48810c5362c265a17faebe90dc2373c885e5216439d37927f02926
    "Debian: libgtest-dev" FIND_PACKAGE_ARGS NAMES GTest QUIET GLOBAL)
endfunction()
