// Implementation of persistent.h: persistent_gpu.h for a cell and dtype, compiled by nvcc;
// persistent_launch.cpp for all.
#pragma once

#include "cell/cells.h"
#include "cuda/kernel/persistent.h"

#include <cstddef>
#include <cstdint>

namespace lltm::cuda {

constexpr int kBlockThreads = kWarps * kWarpLanes;

namespace {

// CMakeLists.txt reads this list and compiles the kernels.
using PersistentCells = CellList<Lltm, Lstm, Gru>;

template <typename Body>
bool visit_persistent_cell(const CellInfo& cell, const Body& body) {
  bool found = false;
  PersistentCells::for_each([&]<typename Definition>(Definition definition) {
    if (Definition::kCell.id != cell.id) return;
    body(definition);
    found = true;
  });
  return found;
}

}  // namespace

// Selected by cell id: the cell definition is a different type in every file.
template <int kId, typename Args>
struct PersistentKernels {
  static std::int64_t resident(std::int64_t hidden, int tiles);
  static bool launch(
      const DirectionArgs<Args>& args, std::int64_t groups, int tiles, Stream stream);
};

// Thread blocks that run concurrently on the device, with this much shared memory.
std::int64_t resident_blocks_of(const void* kernel, std::size_t shared_bytes);

// Launches a grid (slices of hidden units, groups of rows, directions) whose blocks all run
// concurrently.
// Returns false if rejected. `args` is the kernel parameter.
bool launch_cooperatively(
    const void* kernel,
    const void* args,
    std::int64_t slices,
    std::int64_t groups,
    int directions,
    std::size_t shared_bytes,
    Stream stream);

}  // namespace lltm::cuda
