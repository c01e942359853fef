# For `cpack -G TGZ` and `cpack -G DEB`, in a build folder with LLTM_RELOCATABLE: the installed
# library searches for libtorch in `libtorch` next to its folder.
set(CPACK_PACKAGE_NAME lltm)
set(CPACK_PACKAGE_VENDOR "the LLTM authors")
# Receives no mail. To publish Debian packages: cpack -D CPACK_PACKAGE_CONTACT="NAME <ADDRESS>".
set(CPACK_PACKAGE_CONTACT "The LLTM authors <lltm@users.noreply.github.com>")
set(CPACK_PACKAGE_HOMEPAGE_URL "${PROJECT_HOMEPAGE_URL}")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "${PROJECT_DESCRIPTION}")
set(needs_torch "Needs libtorch ${LLTM_TORCH_MINOR}, unpacked to a folder named libtorch
next to the folder of this package.")
set(CPACK_COMPONENT_RUNTIME_DESCRIPTION "The shared library.\n${needs_torch}")
set(CPACK_COMPONENT_DEVELOPMENT_DESCRIPTION
  "Headers, CMake package and lltm.pc of the library.\n${needs_torch}")
string(TOLOWER "${CMAKE_SYSTEM_NAME}" system)  # linux, darwin
set(CPACK_PACKAGE_FILE_NAME
  "lltm-${PROJECT_VERSION}-torch${LLTM_TORCH_MINOR}-${system}-${CMAKE_SYSTEM_PROCESSOR}")
set(CPACK_RESOURCE_FILE_LICENSE "${PROJECT_SOURCE_DIR}/LICENSE")
set(CPACK_STRIP_FILES ON)
set(CPACK_COMPONENTS_ALL runtime development)

set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_RUNTIME_PACKAGE_NAME lltm)
set(CPACK_DEBIAN_RUNTIME_PACKAGE_SECTION libs)
set(CPACK_DEBIAN_PACKAGE_VERSION "${PROJECT_VERSION}+torch${LLTM_TORCH_MINOR}")
# Debian 12's versions, which have the compilers' symbols. dpkg-shlibdeps could find the oldest
# sufficient ones, but requires libtorch as a package.
set(CPACK_DEBIAN_RUNTIME_PACKAGE_DEPENDS
  "libc6 (>= 2.34), libstdc++6 (>= 12), libgcc-s1, libgomp1")
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_NAME lltm-dev)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_DEPENDS "lltm (= ${CPACK_DEBIAN_PACKAGE_VERSION})")

set(CPACK_PRE_BUILD_SCRIPTS "${PROJECT_SOURCE_DIR}/cmake/debian.cmake")

# Read once per generator.
set(CPACK_PROJECT_CONFIG_FILE "${PROJECT_BINARY_DIR}/cpack-generator.cmake")
file(CONFIGURE OUTPUT "${CPACK_PROJECT_CONFIG_FILE}" @ONLY CONTENT [[
cmake_minimum_required(VERSION 3.25)  # without it, if() treats ON and OFF as variables
if(NOT "@LLTM_RELOCATABLE@")
  message(FATAL_ERROR "lltm: configure with -DLLTM_RELOCATABLE=ON; otherwise liblltm searches for "
    "libtorch in @LLTM_TORCH_ROOT@")
endif()
if(CPACK_GENERATOR STREQUAL "DEB")
  set(CPACK_PACKAGING_INSTALL_PREFIX /opt/lltm)
endif()
]])
include(CPack)
