# Finds libtorch and defines the imported target lltm::torch, for the build and for
# lltm-config.cmake.
#
# Replaces find_package(Torch), which fails for a CUDA build of torch (the usual package) without a
# CUDA toolkit, changes the entire project's CUDA flags, and returns absolute paths, which must not
# be exported. A project can still call it, before or after this file; both use the same libraries.
#
# lltm_find_torch(reason) searches, in this order: Torch_DIR or Torch_ROOT, CMAKE_PREFIX_PATH
# (torch.utils.cmake_prefix_path, or an unpacked libtorch), LLTM_TORCH_HINTS (set by
# lltm-config.cmake), and the torch of the Python interpreter on the PATH. Each configuration
# searches again, without a cache; its directories all use the libtorch found first. Sets `reason`
# to an error message or "".
#
# Result: lltm::torch, LLTM_TORCH_ROOT (the folder with include/ and lib/), LLTM_TORCH_VERSION
# (major.minor.patch).

function(lltm_find_torch reason)
  set(${reason} "" PARENT_SCOPE)
  if(NOT TARGET lltm::torch)
    set(problem "")
    _lltm_torch_root(root)
    _lltm_add_torch("${root}" problem)
    if(problem)
      set(${reason} "${problem}" PARENT_SCOPE)
      return()
    endif()
  endif()
  foreach(name ROOT VERSION)
    get_property(value TARGET lltm::torch PROPERTY LLTM_TORCH_${name})
    set(LLTM_TORCH_${name} "${value}" PARENT_SCOPE)
  endforeach()
endfunction()

function(_lltm_torch_root result)
  # find commands skip the search if the variable exists, also in the cache: hence private names.
  unset(_lltm_torch_config)
  unset(_lltm_python)
  find_path(_lltm_torch_config TorchConfig.cmake NO_CACHE
    HINTS ${Torch_DIR} ${Torch_ROOT} $ENV{Torch_DIR} $ENV{Torch_ROOT}
      ${CMAKE_PREFIX_PATH} $ENV{CMAKE_PREFIX_PATH} ${LLTM_TORCH_HINTS}
    PATH_SUFFIXES "" Torch share/cmake/Torch)
  if(NOT _lltm_torch_config)
    # Python_EXECUTABLE: the interpreter that builds a wheel is not always the first on the PATH.
    find_program(_lltm_python NAMES ${Python_EXECUTABLE} python3 python NO_CACHE)
    if(_lltm_python)
      # Importing torch takes seconds.
      execute_process(
        COMMAND ${_lltm_python} -c
          "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
        OUTPUT_VARIABLE folder OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
      find_path(_lltm_torch_config TorchConfig.cmake NO_CACHE
        HINTS "${folder}/share/cmake/Torch" NO_DEFAULT_PATH)
    endif()
  endif()
  set(${result} "" PARENT_SCOPE)
  if(_lltm_torch_config)
    get_filename_component(root "${_lltm_torch_config}/../../.." REALPATH)
    set(${result} "${root}" PARENT_SCOPE)
  endif()
endfunction()

function(_lltm_add_torch root problem)
  if(NOT root)
    set(${problem} "libtorch not found. Set CMAKE_PREFIX_PATH to the folder of an unpacked libtorch, \
or to the output of: python -c \"import torch; print(torch.utils.cmake_prefix_path)\"" PARENT_SCOPE)
    return()
  endif()
  set(header "${root}/include/torch/headeronly/version.h")
  set(version "")
  if(EXISTS "${header}")
    file(STRINGS "${header}" lines REGEX "define TORCH_VERSION_[A-Z]+ +[0-9]+")
    string(REGEX REPLACE "[^0-9;]" "" version "${lines}")
    list(JOIN version "." version)
    string(REGEX MATCH "^[0-9]+\\.[0-9]+\\.[0-9]+" version "${version}")
  endif()
  if(NOT version)
    set(${problem} "expected libtorch 2.11 or later in ${root}, but ${header} does not exist" PARENT_SCOPE)
    return()
  endif()
  set(libraries "")
  foreach(name torch torch_cpu c10)
    unset(_lltm_library)
    find_library(_lltm_library ${name} HINTS "${root}/lib" NO_DEFAULT_PATH NO_CACHE)
    if(NOT _lltm_library)
      set(${problem} "library ${name} not found in ${root}/lib" PARENT_SCOPE)
      return()
    endif()
    list(APPEND libraries "${_lltm_library}")
  endforeach()

  add_library(lltm::torch INTERFACE IMPORTED GLOBAL)
  target_include_directories(lltm::torch SYSTEM INTERFACE
    "${root}/include" "${root}/include/torch/csrc/api/include")
  target_compile_features(lltm::torch INTERFACE cxx_std_20)
  # A program's search path (DT_RUNPATH) does not apply to its libraries' dependencies, so the program
  # must load libtorch itself. libtorch.so only loads the backends.
  _lltm_always_load(lltm::torch ${libraries})
  target_link_libraries(lltm::torch INTERFACE ${libraries})

  set_target_properties(lltm::torch PROPERTIES
    LLTM_TORCH_ROOT "${root}"
    LLTM_TORCH_VERSION "${version}")
endfunction()

# Programs that link the target load these libraries, even without calling them. Many compilers pass
# --as-needed, which would drop them. Apple's linker keeps all libraries.
function(_lltm_always_load target)
  list(JOIN ARGN "," libraries)
  if(NOT APPLE)
    target_link_options(${target} INTERFACE
      "LINKER:--push-state,--no-as-needed,${libraries},--pop-state")
  endif()
endfunction()
