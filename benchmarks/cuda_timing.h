// Times of what is queued on the current stream, by events.
#pragma once

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <cuda_runtime_api.h>

#include <iostream>

namespace lltm_benchmark {

class Event {
 public:
  Event() { C10_CUDA_CHECK(cudaEventCreate(&event_)); }
  ~Event() { C10_CUDA_CHECK_WARN(cudaEventDestroy(event_)); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void record() { C10_CUDA_CHECK(cudaEventRecord(event_, c10::cuda::getCurrentCUDAStream())); }
  double seconds_since(const Event& start) {
    float milliseconds = 0;
    C10_CUDA_CHECK(cudaEventSynchronize(event_));
    C10_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, start.event_, event_));
    return milliseconds * 1e-3;
  }

 private:
  cudaEvent_t event_;
};

// Of one of `runs` runs.
template <typename Run>
double time(const Run& run, int runs) {
  Event start, end;
  start.record();
  for (int k = 0; k < runs; ++k) run();
  end.record();
  return end.seconds_since(start) / runs;
}

// Else says so.
inline bool has_gpu() {
  int devices = 0;
  const bool found = cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
  if (!found) std::cerr << "no GPU here\n";
  return found;
}

}  // namespace lltm_benchmark
