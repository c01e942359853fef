// LLTM_API marks the exported symbols of liblltm. All other symbols are hidden.
#pragma once

#if !defined(_MSC_VER) && __cplusplus < 201709L
#error "lltm needs C++20: compile with -std=c++20"
#endif

#if defined(_WIN32)
#if defined(LLTM_BUILDING)
#define LLTM_API __declspec(dllexport)
#else
#define LLTM_API __declspec(dllimport)
#endif
#else
#define LLTM_API __attribute__((visibility("default")))
#endif
