// How the persistent engine runs a problem: what was measured to be fastest on a GPU of the same
// kind, from tuning_table.h, or nothing where nothing was measured.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace lltm::cuda {

// GPUs that run the same code at the same time: kernels of one compute capability (90 for 9.0),
// on as many multiprocessors.
struct GpuKind {
  int capability = 0;
  int multiprocessors = 0;
  bool operator==(const GpuKind&) const = default;
};

enum class Direction { forward, backward };

struct Tuning {
  int tiles;             // of rows to a group, one of kTileCounts; 0: step by step is faster
  int poll_nanoseconds;  // how long a thread sleeps between two looks at a word
  bool operator==(const Tuning&) const = default;
};

// The fastest way for up to so many hidden units and rows of the state.
struct TuningEntry {
  GpuKind gpu;
  std::string_view cell;  // its name (cell.h)
  Direction direction;
  std::int64_t element_bytes;
  std::int64_t most_hidden, most_batch;
  Tuning tuning;
};

// The entry of the smallest measured sizes that are enough. More than twice as many hidden units
// say nothing, because there the thread blocks are twice as many.
//
// For one GPU, cell, direction and dtype, entries are in the order of hidden units, and then of
// rows.
template <typename Table>
constexpr std::optional<Tuning> find_tuning(
    const Table& table,
    const GpuKind& gpu,
    std::string_view cell,
    Direction direction,
    std::int64_t element_bytes,
    std::int64_t hidden,
    std::int64_t batch) {
  std::int64_t measured_hidden = 0;
  for (const TuningEntry& entry : table) {
    if (entry.gpu != gpu || entry.cell != cell || entry.direction != direction) continue;
    if (entry.element_bytes != element_bytes || entry.most_hidden < hidden) continue;
    if (measured_hidden == 0) measured_hidden = entry.most_hidden;
    if (entry.most_hidden != measured_hidden || measured_hidden > 2 * hidden) break;
    if (entry.most_batch >= batch) return entry.tuning;
  }
  return std::nullopt;
}

}  // namespace lltm::cuda
