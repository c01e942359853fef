#pragma once

#include <chrono>

namespace lltm::cpu {

// Until then at least, this process's idle OpenMP threads sleep soon, also after PyTorch's
// operations. libgomp's otherwise spin for milliseconds, on CPUs that other processes need. For up
// to 16 CPUs; returns immediately, without an error if no thread can be created.
//
// libgomp's threads spin for microseconds only if there are more of them than CPUs (GOMP_SPINCOUNT
// in its manual; it reads the variable before this library is loaded). So the process gets a team
// of more threads that do nothing.
void keep_idle_team(std::chrono::steady_clock::time_point until);

}  // namespace lltm::cpu
