// A second stream of the current device, for work that runs beside that of the current one.
#pragma once

#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

namespace lltm::cuda {

// The current stream must stay current. Memory that the side stream uses belongs to the current
// one, which therefore has to join() before that memory is given back. A graph captures both.
class SideStream {
 public:
  // What run() queues from now on waits for what the current stream has by now.
  void follow() const { order(c10::cuda::getCurrentCUDAStream(), stream_); }

  // What the current stream gets from now on waits for what run() has queued by now.
  void join() const { order(stream_, c10::cuda::getCurrentCUDAStream()); }

  // Queues what body() does.
  template <typename Body>
  void run(const Body& body) const {
    const c10::cuda::CUDAStreamGuard guard(stream_);
    body();
  }

 private:
  static void order(const c10::cuda::CUDAStream& first, const c10::cuda::CUDAStream& then) {
    at::cuda::CUDAEvent event;
    event.record(first);
    event.block(then);
  }

  c10::cuda::CUDAStream stream_ = c10::cuda::getStreamFromPool();
};

}  // namespace lltm::cuda
