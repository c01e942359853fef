// Functions of libtorch's OpenMP runtime, called directly as by GCC: Clang then uses this runtime
// instead of loading another.
#pragma once

extern "C" {
void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags);
int omp_get_num_procs() noexcept;
int omp_get_num_threads() noexcept;
int omp_get_thread_num() noexcept;
}
