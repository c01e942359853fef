# Installs liblltm, its headers, its CMake package and lltm.pc.
#
#   lltm_install_prefix(target)   to a prefix, components `runtime` and `development`
#   lltm_install_wheel(target)    to the Python package's folder, component `python`; further
#                                 arguments go to install()
include_guard(GLOBAL)
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

# LLTM_ORIGIN: the folder of the loading file, in search paths. LLTM_PC_LIBRARIES: flags that keep
# the libraries in a program that does not call them.
set(LLTM_PC_LIBRARIES "-llltm -ltorch -ltorch_cpu -lc10")
if(APPLE)
  set(LLTM_ORIGIN "@loader_path")
else()
  set(LLTM_ORIGIN "$ORIGIN")
  set(LLTM_PC_LIBRARIES
    "-Wl,--push-state,--no-as-needed ${LLTM_PC_LIBRARIES} -Wl,--pop-state")
endif()

# For programs that do not link torch or load liblltm with dlopen, liblltm must find libtorch: in
# its present folder, or in `libtorch` next to the prefix.
function(lltm_install_prefix target)
  file(RELATIVE_PATH beside "/opt/lltm/${CMAKE_INSTALL_LIBDIR}" /opt/libtorch)
  set(search_path "${LLTM_ORIGIN}" "${LLTM_ORIGIN}/${beside}/lib")
  if(LLTM_RELOCATABLE)
    set(torch "@here@/${beside}")
  else()
    set(torch "${LLTM_TORCH_ROOT}")
    list(APPEND search_path "${LLTM_TORCH_ROOT}/lib")
  endif()
  # Changing the path when installing would leave a build ID that depends on the build folder.
  set_target_properties(${target} PROPERTIES
    INSTALL_RPATH "${search_path}" BUILD_WITH_INSTALL_RPATH "${LLTM_RELOCATABLE}")
  _lltm_install(${target} "${CMAKE_INSTALL_LIBDIR}" "${CMAKE_INSTALL_INCLUDEDIR}" "${torch}"
    runtime development)
  install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" "${PROJECT_SOURCE_DIR}/LICENSE-THIRD-PARTY"
    DESTINATION "${CMAKE_INSTALL_DATADIR}/licenses/lltm" COMPONENT runtime)
endfunction()

# torch is a package next to lltm.
set(LLTM_SITE_PACKAGES ".." CACHE STRING "Path from the wheel's lib/.. to the folder of packages")
mark_as_advanced(LLTM_SITE_PACKAGES)
function(lltm_install_wheel target)
  set(site "../${LLTM_SITE_PACKAGES}")
  set_target_properties(${target} PROPERTIES
    INSTALL_RPATH "${LLTM_ORIGIN};${LLTM_ORIGIN}/${site}/torch/lib" BUILD_WITH_INSTALL_RPATH ON)
  _lltm_install(${target} lib include "@here@/${site}/torch" python python ${ARGN})
endfunction()

# "@here@" in `torch`, libtorch's folder, is replaced by the library's folder.
function(_lltm_install target lib include torch runtime development)
  set(cmake ${lib}/cmake/lltm)
  set(generated "${PROJECT_BINARY_DIR}/install/${target}")

  string(REPLACE "@here@" "\${CMAKE_CURRENT_LIST_DIR}/../.." torch_hint "${torch}")
  configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/lltm-config.cmake.in"
    "${generated}/lltm-config.cmake" INSTALL_DESTINATION ${cmake} NO_SET_AND_CHECK_MACRO)
  write_basic_package_version_file("${generated}/lltm-config-version.cmake"
    VERSION ${PROJECT_VERSION} COMPATIBILITY SameMinorVersion)

  string(REPLACE "@here@" "\${pcfiledir}/.." torch_root "${torch}")
  file(RELATIVE_PATH to_prefix "/prefix/${lib}/pkgconfig" /prefix)
  configure_file("${PROJECT_SOURCE_DIR}/cmake/lltm.pc.in" "${generated}/lltm.pc" @ONLY)

  install(TARGETS ${target} EXPORT ${target}-targets ${ARGN}
    LIBRARY DESTINATION ${lib} COMPONENT ${runtime} NAMELINK_COMPONENT ${development}
    FILE_SET HEADERS DESTINATION ${include} COMPONENT ${development})
  if(LLTM_CUDA_EMBED)
    install(DIRECTORY "${PROJECT_BINARY_DIR}/lltm-kernels" DESTINATION ${lib}
      COMPONENT ${runtime} ${ARGN})
  endif()
  install(EXPORT ${target}-targets FILE lltm-targets.cmake NAMESPACE lltm::
    DESTINATION ${cmake} COMPONENT ${development} ${ARGN})
  install(FILES
    "${generated}/lltm-config.cmake"
    "${generated}/lltm-config-version.cmake"
    "${PROJECT_SOURCE_DIR}/cmake/lltm-torch.cmake"
    DESTINATION ${cmake} COMPONENT ${development} ${ARGN})
  # In the search path of programs linked with lltm.pc.
  install(DIRECTORY DESTINATION ${lib}/pkgconfig COMPONENT ${runtime} ${ARGN})
  install(FILES "${generated}/lltm.pc"
    DESTINATION ${lib}/pkgconfig COMPONENT ${development} ${ARGN})
endfunction()
