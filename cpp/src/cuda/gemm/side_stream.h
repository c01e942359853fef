// A second stream, for work that runs beside that of the current one.
#pragma once

#include <functional>

namespace lltm::cuda {

// The current device's stream of this thread that nobody else uses: what one knows of a stream, its
// workspace of cuBLAS above all, is kept for as long as the process lasts. The current device and
// stream must stay current.
//
// Memory that it uses belongs to the current stream, so the destructor has that wait for what is
// left: it comes before the memory is given back.
class SideStream {
 public:
  // False while the current stream is captured. A graph would keep the workspace, which eager calls
  // would then use at the same time.
  static bool is_available();

  SideStream();
  ~SideStream();
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;

  // What run() queues from now on waits for what the current stream has by now.
  void follow();
  // Queues what body() does.
  void run(const std::function<void()>& body);
  // What the current stream gets from now on waits for what run() has queued by now.
  void join();

 private:
  void* stream_;  // a cudaStream_t
  bool ahead_ = false;
};

}  // namespace lltm::cuda
