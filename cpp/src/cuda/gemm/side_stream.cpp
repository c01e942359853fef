#include "cuda/gemm/side_stream.h"

#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

#include <map>

namespace lltm::cuda {
namespace {

using c10::cuda::CUDAStream;

CUDAStream current() {
  return c10::cuda::getCurrentCUDAStream();
}

CUDAStream as_stream(void* stream) {
  return c10::cuda::getStreamFromExternal(
      static_cast<cudaStream_t>(stream), current().device_index());
}

void order(const CUDAStream& first, const CUDAStream& then) {
  at::cuda::CUDAEvent event;
  event.record(first);
  event.block(then);
}

}  // namespace

bool SideStream::is_available() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() == c10::cuda::CaptureStatus::None;
}

SideStream::SideStream() {
  thread_local std::map<int, cudaStream_t> streams;  // by device
  cudaStream_t& stream = streams[current().device_index()];
  if (stream == nullptr) {
    C10_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  }
  stream_ = stream;
}

SideStream::~SideStream() {
  try {
    if (ahead_) join();
  } catch (const c10::Error& error) {  // of an earlier kernel, which the next call reports
    TORCH_WARN(error.what_without_backtrace());
  }
}

void SideStream::follow() {
  order(current(), as_stream(stream_));
}

void SideStream::run(const std::function<void()>& body) {
  ahead_ = true;
  const c10::cuda::CUDAStreamGuard guard(as_stream(stream_));
  body();
}

void SideStream::join() {
  order(as_stream(stream_), current());
  ahead_ = false;
}

}  // namespace lltm::cuda
