# Finds libtorch and defines it as the imported target lltm::torch.
#
# Used by the build and, installed beside it, by lltm-config.cmake.
#
# Why not find_package(Torch): with a CUDA build of torch it fails where there
# is no CUDA toolkit (the usual case: torch from the package index), it
# rewrites the CUDA flags of the whole project, and its result holds absolute
# paths that must not be exported. Torch's own layout is simple: include/, lib/.
# It may be called before or after this file; both name the same libraries.
#
# Looked at, in this order: Torch_DIR or Torch_ROOT, CMAKE_PREFIX_PATH (as
# torch.utils.cmake_prefix_path gives it, or the folder of an unpacked
# libtorch), LLTM_TORCH_HINTS (set by lltm-config.cmake), and the torch of the
# Python interpreter on the PATH.
#
# Result: lltm::torch, LLTM_TORCH_ROOT (the folder that holds include/ and
# lib/), LLTM_TORCH_VERSION (major.minor.patch), LLTM_TORCH_HAS_CUDA,
# LLTM_TORCH_CUDA_VERSION (major.minor, of the CUDA that torch was built with).
#
# lltm_require_torch_cuda() defines lltm::torch_cuda as well: torch's CUDA
# libraries, and of CUDA's those that liblltm calls itself. No toolkit is needed
# for it, only what torch brings.
include_guard(GLOBAL)

function(_lltm_find_torch)
  set(suffixes "" Torch share/cmake/Torch)
  find_path(LLTM_TORCH_CONFIG_DIR TorchConfig.cmake
    HINTS ${Torch_DIR} ${Torch_ROOT} $ENV{Torch_DIR} $ENV{Torch_ROOT}
      ${CMAKE_PREFIX_PATH} $ENV{CMAKE_PREFIX_PATH} ${LLTM_TORCH_HINTS}
    PATH_SUFFIXES ${suffixes}
    DOC "Folder of TorchConfig.cmake")
  if(NOT LLTM_TORCH_CONFIG_DIR)
    # The interpreter that builds a wheel is not always the first on the PATH.
    find_program(LLTM_PYTHON_EXECUTABLE NAMES ${Python_EXECUTABLE} python3 python)
    if(LLTM_PYTHON_EXECUTABLE)
      # The folder is found without importing torch, which takes seconds.
      execute_process(
        COMMAND ${LLTM_PYTHON_EXECUTABLE} -c
          "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
        OUTPUT_VARIABLE folder OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
      find_path(LLTM_TORCH_CONFIG_DIR TorchConfig.cmake
        HINTS "${folder}/share/cmake/Torch" NO_DEFAULT_PATH)
    endif()
  endif()
  if(NOT LLTM_TORCH_CONFIG_DIR)
    message(FATAL_ERROR
      "lltm: libtorch not found. Set CMAKE_PREFIX_PATH to the folder of an unpacked libtorch, "
      "or to the output of: python -c \"import torch; print(torch.utils.cmake_prefix_path)\"")
  endif()

  get_filename_component(root "${LLTM_TORCH_CONFIG_DIR}/../../.." REALPATH)
  file(STRINGS "${root}/include/torch/headeronly/version.h" lines REGEX "define TORCH_VERSION_[A-Z]+ +[0-9]+")
  string(REGEX REPLACE "[^0-9;]" "" version "${lines}")
  list(JOIN version "." version)
  string(REGEX MATCH "^[0-9]+\\.[0-9]+\\.[0-9]+" version "${version}")

  foreach(name c10 torch_cpu torch)
    # `unset` keeps a second build tree with another torch from reusing it.
    unset(library CACHE)
    find_library(library ${name} HINTS "${root}/lib" NO_DEFAULT_PATH)
    if(NOT library)
      message(FATAL_ERROR "lltm: ${root}/lib holds no library ${name}")
    endif()
    set(${name}_library "${library}")
    unset(library CACHE)
  endforeach()

  add_library(lltm::torch INTERFACE IMPORTED GLOBAL)
  target_include_directories(lltm::torch SYSTEM INTERFACE
    "${root}/include" "${root}/include/torch/csrc/api/include")
  target_compile_features(lltm::torch INTERFACE cxx_std_20)
  # libtorch.so carries no symbols: it exists to load the backends (CUDA), so
  # the linker must not drop it.
  target_link_libraries(lltm::torch INTERFACE
    "${torch_cpu_library}" "${c10_library}"
    "-Wl,--push-state,--no-as-needed,${torch_library},--pop-state")

  set(LLTM_TORCH_ROOT "${root}" PARENT_SCOPE)
  set(LLTM_TORCH_VERSION "${version}" PARENT_SCOPE)
  set(LLTM_TORCH_HAS_CUDA OFF PARENT_SCOPE)
  set(LLTM_TORCH_CUDA_VERSION "" PARENT_SCOPE)
  if(EXISTS "${root}/lib/libtorch_cuda.so")
    set(LLTM_TORCH_HAS_CUDA ON PARENT_SCOPE)
    # 2.13.0+cu130 in a Python package as in an unpacked libtorch; the former also
    # says 13.0.
    foreach(file version.py build-version)
      if(EXISTS "${root}/${file}")
        file(READ "${root}/${file}" text)
        if(text MATCHES "cuda: [^\n]*'([0-9]+\\.[0-9]+)'")
          set(LLTM_TORCH_CUDA_VERSION "${CMAKE_MATCH_1}" PARENT_SCOPE)
        elseif(text MATCHES "\\+cu([0-9]+)([0-9])")
          set(LLTM_TORCH_CUDA_VERSION "${CMAKE_MATCH_1}.${CMAKE_MATCH_2}" PARENT_SCOPE)
        endif()
      endif()
    endforeach()
  endif()
endfunction()

function(lltm_require_torch_cuda)
  if(TARGET lltm::torch_cuda)
    return()
  endif()
  string(REGEX MATCH "^[0-9]+" major "${LLTM_TORCH_CUDA_VERSION}")
  # Beside torch in a Python environment: one folder for CUDA 13, one for each
  # library before. In libtorch's own folder. In a toolkit's.
  get_filename_component(site "${LLTM_TORCH_ROOT}" DIRECTORY)
  set(hints "${site}/nvidia/cu${major}/lib"
    "${site}/nvidia/cuda_runtime/lib" "${site}/nvidia/cublas/lib" "${LLTM_TORCH_ROOT}/lib")
  foreach(toolkit "${CUDAToolkit_ROOT}" "$ENV{CUDA_PATH}" "$ENV{CUDA_HOME}" /usr/local/cuda)
    if(toolkit)
      list(APPEND hints "${toolkit}/lib64" "${toolkit}/lib")
    endif()
  endforeach()
  set(libraries "")
  foreach(name c10_cuda torch_cuda cudart cublas)
    unset(library CACHE)
    # Packages hold libcudart.so.13 and no libcudart.so.
    find_library(library NAMES lib${name}.so.${major} ${name} HINTS ${hints})
    if(NOT library)
      message(FATAL_ERROR
        "lltm: no library ${name} of CUDA ${LLTM_TORCH_CUDA_VERSION}, which the torch in "
        "${LLTM_TORCH_ROOT} was built with; set CUDAToolkit_ROOT to where it is")
    endif()
    list(APPEND libraries "${library}")
    unset(library CACHE)
  endforeach()
  add_library(lltm::torch_cuda INTERFACE IMPORTED GLOBAL)
  # Executables find what liblltm needs only where they name it themselves.
  list(JOIN libraries "," kept)
  target_link_libraries(lltm::torch_cuda INTERFACE lltm::torch ${libraries}
    "-Wl,--push-state,--no-as-needed,${kept},--pop-state")
  set(LLTM_TORCH_CUDA_LIBRARIES "${libraries}" PARENT_SCOPE)
endfunction()

_lltm_find_torch()
