# Adds files in /usr/share that Debian requires: copyright, changelog and a lintian override for
# /opt. cpack runs this after installing the packages' files.
cmake_minimum_required(VERSION 3.25)
if(NOT CPACK_GENERATOR STREQUAL "DEB")
  return()
endif()

string(TIMESTAMP date "%a, %d %b %Y %H:%M:%S +0000" UTC)  # SOURCE_DATE_EPOCH, if set
file(READ "${CPACK_RESOURCE_FILE_LICENSE}" license)
file(READ "${CPACK_RESOURCE_FILE_LICENSE}-THIRD-PARTY" third_party)
foreach(component IN LISTS CPACK_COMPONENTS_ALL)
  string(TOUPPER "${component}" upper)
  set(package "${CPACK_DEBIAN_${upper}_PACKAGE_NAME}")
  set(share "${CPACK_TEMPORARY_INSTALL_DIRECTORY}/${component}/usr/share")
  set(doc "${share}/doc/${package}")
  file(WRITE "${doc}/copyright"
    "The sources of this package: ${CPACK_PACKAGE_HOMEPAGE_URL}\n\n${license}\n${third_party}")
  file(WRITE "${doc}/changelog" "${package} (${CPACK_DEBIAN_PACKAGE_VERSION}) stable; urgency=low

  * Changes: ${CPACK_PACKAGE_HOMEPAGE_URL}/blob/main/CHANGELOG.md

 -- ${CPACK_PACKAGE_CONTACT}  ${date}
")
  execute_process(COMMAND gzip --best --no-name "${doc}/changelog" COMMAND_ERROR_IS_FATAL ANY)
  file(WRITE "${share}/lintian/overrides/${package}"
    "# Not part of Debian; requires an unpacked libtorch in the folder next to it: FHS 3.13.\n"
    "${package}: dir-or-file-in-opt\n")
endforeach()
