# In addition to find_package, searches the Python package nlohmann_json, which has only headers.
find_package(nlohmann_json ${nlohmann_json_FIND_VERSION} CONFIG QUIET GLOBAL)
if(nlohmann_json_FOUND)
  return()
endif()

set(folder "")
find_program(LLTM_PYTHON_EXECUTABLE NAMES ${Python_EXECUTABLE} python3 python)
if(LLTM_PYTHON_EXECUTABLE)
  execute_process(
    COMMAND "${LLTM_PYTHON_EXECUTABLE}" -c
      "import importlib.util as u; print(u.find_spec('nlohmann_json').submodule_search_locations[0])"
    OUTPUT_VARIABLE folder OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
if(EXISTS "${folder}/include/nlohmann/json.hpp")
  set(nlohmann_json_FOUND ON)
  add_library(nlohmann_json::nlohmann_json INTERFACE IMPORTED GLOBAL)
  target_include_directories(nlohmann_json::nlohmann_json SYSTEM INTERFACE "${folder}/include")
endif()
