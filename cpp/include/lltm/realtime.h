// Recurrent layers for programs without PyTorch, one sample at a time: audio, control, trading.
//
//     lltm.realtime.save(layer, "model.rt")                    in Python
//
//     lltm::realtime::Layer layer("model.rt");                 in C++
//     layer.process(input, output, steps);                     in the real-time thread
//
// The library needs neither PyTorch nor OpenMP. process() does not allocate, lock, wait, throw or
// call the operating system, not even the first time. Subnormal numbers count as zero while it
// runs; otherwise results are those of Python's layer up to rounding.
//
// Symbols: L layers, B independent sequences, I input size, H hidden size, K states other than h
// (1 of an LSTM, 0 of a GRU).
#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#error "lltm/realtime.h needs GCC or Clang: the kernels use their vector extensions"
#endif
#define LLTM_REALTIME_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/// A layer with its states.
typedef struct lltm_realtime lltm_realtime;

/// Reads a layer from a file.
///
/// @param path a file of lltm.realtime.save
/// @param batch B, at least 1
/// @param error receives the reason of a failure; or NULL
/// @param error_size size of `error`, in characters with the final zero
/// @returns NULL on failure
LLTM_REALTIME_API lltm_realtime* lltm_realtime_load(
    const char* path, int64_t batch, char* error, size_t error_size);
LLTM_REALTIME_API void lltm_realtime_free(lltm_realtime* layer);
/// Writes I and H.
LLTM_REALTIME_API void lltm_realtime_sizes(
    const lltm_realtime* layer, int64_t* input_size, int64_t* hidden_size);
/// As Layer::reset and Layer::process.
LLTM_REALTIME_API void lltm_realtime_reset(lltm_realtime* layer);
LLTM_REALTIME_API void lltm_realtime_process(
    lltm_realtime* layer, const float* input, float* output, int64_t steps);

#ifdef __cplusplus
}

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace lltm::realtime {

/// A layer (or several) with its states. Different objects may be used concurrently.
class LLTM_REALTIME_API Layer {
 public:
  /// Reads a file of lltm.realtime.save. Throws std::invalid_argument, whose message names the
  /// file, if it cannot be read or is not such a file.
  ///
  /// @param path the file
  /// @param batch B, at least 1
  explicit Layer(const std::string& path, std::int64_t batch = 1);
  /// The same from the file's bytes, which are copied.
  explicit Layer(std::span<const std::byte> file, std::int64_t batch = 1);
  Layer(Layer&&) noexcept;
  Layer& operator=(Layer&&) noexcept;
  ~Layer();

  std::int64_t num_layers() const noexcept;   ///< L
  std::int64_t batch_size() const noexcept;   ///< B
  std::int64_t input_size() const noexcept;   ///< I
  std::int64_t hidden_size() const noexcept;  ///< H
  std::int64_t state_size() const noexcept;   ///< L * (1 + K) * B * H
  /// Bytes that the object has allocated.
  std::size_t memory_bytes() const noexcept;

  /// Computes the next steps of each sequence. The result does not depend on how a sequence is
  /// divided into calls.
  ///
  /// @param input (steps, B, I), contiguous
  /// @param output (steps, B, H), contiguous; must not overlap input
  /// @param steps at least 0; fewer are none
  void process(const float* input, float* output, std::int64_t steps) noexcept;

  /// Sets the states to their values before the first step: zero, or a custom cell's initial
  /// values.
  void reset() noexcept;
  /// Copies the states (L, 1 + K, B, H), h first.
  void get_state(float* state) const noexcept;
  void set_state(const float* state) noexcept;

 private:
  struct Memory;
  std::unique_ptr<Memory> memory_;
};

}  // namespace lltm::realtime
#endif
