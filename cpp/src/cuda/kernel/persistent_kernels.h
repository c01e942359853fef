// One thread's code in a persistent kernel, for host and device. `Machine` provides GPU functions:
//
//     int slice() const, group() const, thread() const
//     Sums* shared() const                       shared_sums() elements
//     void sync_warp(), sync_block()
//     std::uint32_t neighbor(std::uint32_t)      argument of lane ^ 1
//     Words read(const void*)                    16 bytes that may be written concurrently
//     void publish(void*, std::uint32_t)         4 bytes that may be read concurrently
//     void begin()                               counts the block
//     bool all_have_begun()                      all blocks in the launch
//     bool wait(int& polls)                      between polls; false if the lane times out
//                                                (Patience)
//     void mma<T>(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t, std::uint32_t)
//                                                d += a b (mma.m16n8k16)
//
// mma, sync_warp and neighbor require all lanes in a warp, sync_block all threads in a block:
// conditions around their calls are uniform.
#pragma once

#include "cell/cells.h"
#include "cuda/kernel/elementwise_kernels.h"
#include "cuda/kernel/persistent.h"

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <type_traits>
#include <utility>

namespace lltm::cuda {
namespace {

// Pre-activations that depend on h: outputs of forward's recurrent GEMM, blocks in backward's K.
template <typename Definition>
constexpr int kRecurrent = Definition::kCell.h.count();
template <typename Definition, typename Args>
constexpr int kOutputsOf = Args::kIsForward ? kRecurrent<Definition> : 1;

// An absent word; a word holds two adjacent units.
constexpr std::uint32_t kAbsent = 0xFFFFFFFF;

struct alignas(16) Words {
  std::uint32_t w[4];
};

LLTM_CELL_INLINE bool is_there(const Words& x) {
  return x.w[0] != kAbsent && x.w[1] != kAbsent && x.w[2] != kAbsent && x.w[3] != kAbsent;
}

// The only stored NaN, in both formats.
constexpr std::uint16_t kNaN = 0x7FFF;
constexpr std::uint32_t kNaNs = std::uint32_t{kNaN} << 16 | kNaN;
constexpr Words kNaNWords = {{kNaNs, kNaNs, kNaNs, kNaNs}};

// Two units never form an absent word.
template <typename T>
LLTM_CELL_INLINE T narrow(float x) {
  return x == x ? static_cast<T>(x) : math::bit_cast<T>(kNaN);
}

// This lane's and the next lane's units; valid in even lanes. Called by full warps.
template <typename T, typename Machine>
LLTM_CELL_INLINE std::uint32_t word_of(Machine& m, float value) {
  const std::uint32_t bits = math::bit_cast<std::uint16_t>(narrow<T>(value));
  return bits | m.neighbor(bits) << 16;
}

struct StepCursor {
  bool ascending;
  std::int64_t edge, time;  // as in LaunchSteps, for the next step
  std::int64_t offset, rows, previous_offset, previous_rows;

  LLTM_CELL_INLINE explicit StepCursor(const LaunchSteps& steps)
      : ascending(steps.ascending),
        edge(steps.edge),
        time(steps.ascending ? steps.time - 1 : steps.time + 1),
        offset(steps.previous_offset),
        rows(steps.previous_rows),
        previous_offset(0),
        previous_rows(0) {}

  LLTM_CELL_INLINE void advance(std::int64_t next_rows) {
    previous_offset = offset;
    previous_rows = rows;
    rows = next_rows;
    offset = ascending ? edge : edge - rows;
    edge = ascending ? edge + rows : offset;
    time += ascending ? 1 : -1;
  }
};

template <typename Body>
LLTM_CELL_INLINE void for_each_step(const LaunchSteps& steps, const Body& body) {
  StepCursor cursor(steps);
  for (int n = 0; n < steps.runs; ++n) {
    const StepRun run = steps.run[n];
    for (std::int64_t k = 0; k < run.count; ++k) {
      cursor.advance(run.rows);
      body(cursor);
    }
  }
}

// Partial sums for two adjacent units, over a warp's K.
struct alignas(8) Sums {
  float values[2];
};

constexpr int kTileSums = kTileRows * kSliceUnits / 2;

// A step's element-wise part reads one while warps that are ahead write the other.
template <int kTiles, int kOutputs>
LLTM_CELL_INLINE constexpr int shared_sums() {
  return 2 * kWarps * kTiles * kOutputs * kTileSums;
}

// Index in a tile for a row and the unit pair that contains `unit`. Without bank conflicts: a half
// warp that writes mma results (a row and two units per lane) accesses each bank once, as does a
// warp that reads all units of rows 2n and 2n + 1.
LLTM_CELL_INLINE constexpr int place_of_sums(int row, int unit) {
  const int line = row % 2 * 2 + unit / 8;
  return 16 * line + 4 * (row / 2 ^ line) + unit % 8 / 2;
}

// In the element-wise part, a thread handles one unit of one row, and four warps a tile. With four
// tiles, each thread has another row two tiles later.
constexpr int kTileWarps = kTileRows * kSliceUnits / kWarpLanes;
constexpr int kTilesAtOnce = kWarps / kTileWarps;
template <int kTiles>
constexpr int kRowsOfThread = (kTiles + kTilesAtOnce - 1) / kTilesAtOnce;

struct ThreadPosition {
  bool takes_part, is_unit;  // takes_part is uniform within a warp
  int tile, sums, odd;       // odd: the unit's index in `sums`
  std::int64_t warp_row, first_row, unit;

  template <int kTiles, typename Machine>
  static LLTM_CELL_INLINE ThreadPosition
  of(const Machine& m, std::int64_t first_row, std::int64_t hidden) {
    const int warp = m.thread() / kWarpLanes, lane = m.thread() % kWarpLanes;
    const int pair_of_rows = 2 * (warp % kTileWarps), row = pair_of_rows + lane / kSliceUnits;
    const int unit = lane % kSliceUnits;
    ThreadPosition p;
    p.tile = warp / kTileWarps;
    p.takes_part = p.tile < kTiles;
    p.sums = place_of_sums(row, unit);
    p.odd = unit % 2;
    p.warp_row = first_row + p.tile * kTileRows + pair_of_rows;
    p.first_row = first_row + p.tile * kTileRows + row;
    p.unit = std::int64_t{m.slice()} * kSliceUnits + unit;
    p.is_unit = p.takes_part && p.unit < hidden;
    return p;
  }

  LLTM_CELL_INLINE std::int64_t row(int n) const {
    return first_row + n * kTilesAtOnce * kTileRows;
  }
  // This row (is_in) or any of the warp's rows (warp_is_in).
  LLTM_CELL_INLINE bool is_in(std::int64_t rows, int n) const { return is_unit && row(n) < rows; }
  LLTM_CELL_INLINE bool warp_is_in(std::int64_t rows) const {
    return takes_part && warp_row < rows;
  }
  LLTM_CELL_INLINE bool has_word() const { return odd == 0; }
};

template <int kTiles, typename Machine>
LLTM_CELL_INLINE std::int64_t first_row_of(const Machine& m, std::int64_t first_row) {
  return first_row + std::int64_t{m.group()} * kTiles * kTileRows;
}

// Limits a lane's wait for a word, so that a lost word ends the kernel. Counts polls, because a
// clock continues while another process or a debugger interrupts the kernel. Blocks may begin
// arbitrarily late if another stream occupies multiprocessors: a lane stops only if its polls run
// out after all blocks had begun.
struct Patience {
  static constexpr int kMostCounts = 60;  // about a minute; longer waits have other causes
  int counts = kMostCounts;               // negative after a timeout

  // `polls`: of a word so far.
  template <typename Machine>
  LLTM_CELL_INLINE bool wait(Machine& m, int& polls, int most_polls) {
    if (counts < 0) return false;
    if (polls <= most_polls) return true;
    if (counts == 0) {
      counts = -1;
      return false;
    }
    polls = 0;
    counts = m.all_have_begun() ? 0 : counts - 1;
    return true;
  }
};

// Warps get units of kWarpUnits elements of K, round-robin. Within a unit, K is permuted for A and
// B: lane % 4 = q has elements 8q to 8q + 7. So 16 bytes in a row of B are operands for two mma.
LLTM_CELL_INLINE std::int64_t k_of(int warp, int lane, int j) {
  return std::int64_t{kWarpUnits} * (warp + kWarps * j) + 8 * (lane % 4);
}

// A (kSliceUnits, K) has hidden units as rows. Row r in its tile is unit 2r, row r + 8 unit 2r + 1:
// a lane gets two adjacent units of the result.
template <int kUnitsK>
struct WeightFragments {
  std::uint32_t a[kUnitsK][2][4];

  // The remaining rows are zero.
  template <typename T>
  LLTM_CELL_INLINE void load(
      const T* rows, std::int64_t units, std::int64_t k_size, int warp, int lane) {
    LLTM_UNROLL
    for (int j = 0; j < kUnitsK; ++j) {
      const std::int64_t k = k_of(warp, lane, j);
      LLTM_UNROLL
      for (int odd = 0; odd < 2; ++odd) {
        const std::int64_t unit = 2 * (lane / 4) + odd;
        Words x = {};
        if (k < k_size && unit < units) {
          x = math::bit_cast<Words>(*reinterpret_cast<const Access<T>*>(rows + unit * k_size + k));
        }
        LLTM_UNROLL
        for (int part = 0; part < 2; ++part) {
          a[j][part][odd] = x.w[2 * part];
          a[j][part][2 + odd] = x.w[2 * part + 1];
        }
      }
    }
  }
};

// B: lane / 4 is a row in the tile.
template <int kUnitsK>
struct States {
  Words x[kUnitsK];

  template <typename T, typename Machine>
  LLTM_CELL_INLINE void load(Machine& m, const T* row, std::int64_t k_size, int warp, int lane) {
    LLTM_UNROLL
    for (int j = 0; j < kUnitsK; ++j) {
      const std::int64_t k = k_of(warp, lane, j);
      x[j] = row != nullptr && k < k_size ? m.read(row + k) : Words{};
    }
  }

  // Polls until all words are present. Absent words are read again together, to share a round trip.
  // After a timeout, missing words become NaN and the lane continues, so that the grid ends.
  template <typename T, typename Machine>
  LLTM_CELL_INLINE void poll(Machine& m, const T* row, int warp, int lane) {
    for (int polls = 1;; ++polls) {
      bool absent[kUnitsK], any = false;
      LLTM_UNROLL
      for (int j = 0; j < kUnitsK; ++j) any |= absent[j] = !is_there(x[j]);
      if (!any) return;
      const bool goes_on = m.wait(polls);
      LLTM_UNROLL
      for (int j = 0; j < kUnitsK; ++j) {
        if (absent[j]) x[j] = goes_on ? m.read(row + k_of(warp, lane, j)) : kNaNWords;
      }
    }
  }
};

// `polled`: other thread blocks may still be writing the row.
template <typename T>
struct StateRow {
  const T* row;
  bool polled;
};

// Reading the next tile ahead hides latency but needs free registers.
template <int kUnitsK, int kTiles, int kOutputs>
constexpr bool kReadsAhead = kTiles > 1 && (kOutputs + 1) * kUnitsK <= 22;

// Independent mma chains, in which each mma waits for the previous. A single output is split into
// chains to fill the tensor cores, as far as registers allow.
template <int kUnitsK, int kOutputs>
constexpr int kChains = kOutputs > 1 || kUnitsK == 1 ? 1
                        : kUnitsK < 12               ? 4
                                                     : 2;

// `tiles` is the same for all threads. source(tile) is this lane's row in the state.
template <int kTiles, int kUnitsK, int kOutputs, typename T, typename Machine, typename Rows>
LLTM_CELL_INLINE void multiply(
    Machine& m,
    const WeightFragments<kUnitsK> (&weights)[kOutputs],
    std::int64_t tiles,
    std::int64_t k_size,
    const Rows& source,
    Sums* sums) {
  constexpr bool kAhead = kReadsAhead<kUnitsK, kTiles, kOutputs>;
  constexpr int kParts = kChains<kUnitsK, kOutputs>;
  const int warp = m.thread() / kWarpLanes, lane = m.thread() % kWarpLanes;
  States<kUnitsK> states[kAhead ? 2 : 1];
  if (kAhead) states[0].load(m, source(0).row, k_size, warp, lane);
  LLTM_UNROLL
  for (int tile = 0; tile < kTiles; ++tile) {
    if (tile < tiles) {
      States<kUnitsK>& now = states[kAhead ? tile % 2 : 0];
      const StateRow<T> from = source(tile);
      if (!kAhead) now.load(m, from.row, k_size, warp, lane);
      if (kAhead && tile + 1 < kTiles && tile + 1 < tiles) {
        states[(tile + 1) % 2].load(m, source(tile + 1).row, k_size, warp, lane);
      }
      if (from.polled) now.poll(m, from.row, warp, lane);
      m.sync_warp();
      float d[kOutputs][kParts][4] = {};
      LLTM_UNROLL
      for (int j = 0; j < kUnitsK; ++j) {
        LLTM_UNROLL
        for (int part = 0; part < 2; ++part) {
          const std::uint32_t b0 = now.x[j].w[2 * part], b1 = now.x[j].w[2 * part + 1];
          LLTM_UNROLL
          for (int n = 0; n < kOutputs; ++n) {
            m.template mma<T>(d[n][(2 * j + part) % kParts], weights[n].a[j][part], b0, b1);
          }
        }
      }
      Sums* const mine = sums + (warp * kTiles + tile) * kOutputs * kTileSums;
      LLTM_UNROLL
      for (int n = 0; n < kOutputs; ++n) {
        float (&sum)[4] = d[n][0];
        LLTM_UNROLL
        for (int chain = 1; chain < kParts; ++chain) {
          LLTM_UNROLL
          for (int k = 0; k < 4; ++k) sum[k] += d[n][chain][k];
        }
        const int row = 2 * (lane % 4), unit = 2 * (lane / 4);
        mine[n * kTileSums + place_of_sums(row, unit)] = {{sum[0], sum[2]}};
        mine[n * kTileSums + place_of_sums(row + 1, unit)] = {{sum[1], sum[3]}};
      }
    }
  }
}

// In a fixed order. `row` is the index of the thread's row.
template <int kTiles, int kOutputs>
LLTM_CELL_INLINE void add_sums(
    const Sums* sums, const ThreadPosition& p, int row, int output, float& to) {
  LLTM_UNROLL
  for (int warp = 0; warp < kWarps; ++warp) {
    const int tile = p.tile + row * kTilesAtOnce;
    const int block = (warp * kTiles + tile) * kOutputs + output;
    to += sums[block * kTileSums + p.sums].values[p.odd];
  }
}

LLTM_CELL_INLINE std::int64_t tiles_of(std::int64_t rows, std::int64_t first_row) {
  return (rows - first_row + kTileRows - 1) / kTileRows;
}

template <typename Definition, typename T>
LLTM_CELL_INLINE void load_bias(
    const PersistentForwardArgs<T>& a, std::int64_t unit, float (&bias)[Definition::kSlots]) {
  for_each_index<Definition::kSlots>([&](auto slot) {
    constexpr int k = slot, of_x = Definition::kCell.x_blocks[k],
                  of_h = Definition::kCell.h_blocks[k];
    const auto add = [&](const Matrix<const T>& given, int block) {
      float b[1];
      load(given, false, 0, block * a.hidden + unit, b);
      bias[k] += b[0];
    };
    if constexpr (Definition::kCell.x.contains(k)) add(a.bias_ih, of_x);
    if constexpr (Definition::kCell.h.contains(k)) add(a.bias_hh, of_h);
  });
}

// A reset state is zero: the initial value of every state of a built-in cell.
LLTM_CELL_INLINE bool is_reset(const bool* reset, std::int64_t row) {
  return reset != nullptr && reset[row];
}

template <int kTiles, typename T>
LLTM_CELL_INLINE void save_checkpoint(
    const PersistentForwardArgs<T>& a,
    const ThreadPosition& p,
    const StepCursor& step,
    const float (&c)[kRowsOfThread<kTiles>]) {
  if (a.checkpoints == nullptr) return;
  const std::int64_t k = step.ascending ? step.time : a.last_time - step.time;
  if (k % a.checkpoint_steps != 0) return;
  T* const checkpoint = a.checkpoints + k / a.checkpoint_steps * a.batch * a.hidden + p.unit;
  LLTM_UNROLL
  for (int n = 0; n < kRowsOfThread<kTiles>; ++n) {
    if (p.is_in(a.batch, n)) checkpoint[p.row(n) * a.hidden] = static_cast<T>(c[n]);
  }
}

template <typename Definition, int kTiles, typename T, typename Machine>
LLTM_CELL_INLINE void finish_forward(
    const PersistentForwardArgs<T>& a,
    Machine& m,
    const ThreadPosition& p,
    const StepCursor& step,
    const Sums* sums,
    const float (&bias)[Definition::kSlots],
    float (&z)[kRowsOfThread<kTiles>][Definition::kSlots],
    float (&c)[kRowsOfThread<kTiles>],
    float (&h)[kRowsOfThread<kTiles>]) {
  constexpr int kRows = kRowsOfThread<kTiles>, kSaved = Definition::kSaved;
  StepForward<Definition, float> y[kRows];
  std::uint32_t words[kRows];
  LLTM_UNROLL
  for (int n = 0; n < kRows; ++n) {
    for_each_index<Definition::kSlots>([&](auto slot) {
      constexpr int k = slot;
      z[n][k] += bias[k];
      if constexpr (Definition::kCell.h.contains(k)) {
        add_sums<kTiles, kRecurrent<Definition>>(
            sums, p, n, k - Definition::kCell.h.begin, z[n][k]);
      }
    });
    y[n] = Definition::forward(z[n], c[n]);
    words[n] = word_of<T>(m, y[n].h);
  }
  LLTM_UNROLL
  for (int n = 0; n < kRows; ++n) {
    if (!p.is_in(step.rows, n)) continue;
    const std::int64_t row = step.offset + p.row(n);
    if (p.has_word()) m.publish(a.output + row * a.hidden + p.unit, words[n]);
    h[n] = y[n].h;
    // Rounded as at a launch's end: results do not depend on the chunks.
    c[n] = static_cast<float>(static_cast<T>(y[n].c));
    if (a.activations != nullptr) {
      T* const activations = a.activations + row * kSaved * a.hidden + p.unit;
      LLTM_UNROLL
      for (int k = 0; k < kSaved; ++k) activations[k * a.hidden] = static_cast<T>(y[n].saved[k]);
    }
  }
}

template <typename Definition, int kUnitsK, int kTiles, typename T, typename Machine>
LLTM_CELL_INLINE void run_steps(const PersistentForwardArgs<T>& a, Machine& m) {
  constexpr int kSlots = Definition::kSlots, kOutputs = kRecurrent<Definition>;
  constexpr int kRows = kRowsOfThread<kTiles>;
  const std::int64_t hidden = a.hidden;
  const std::int64_t first_row = first_row_of<kTiles>(m, a.first_row);
  const int warp = m.thread() / kWarpLanes, lane = m.thread() % kWarpLanes;
  const std::int64_t slice = std::int64_t{m.slice()} * kSliceUnits;
  m.begin();

  WeightFragments<kUnitsK> weights[kOutputs];
  LLTM_UNROLL
  for (int k = 0; k < kOutputs; ++k) {
    const T* const rows = a.weights + (k * hidden + slice) * hidden;
    weights[k].load(rows, hidden - slice, hidden, warp, lane);
  }

  const ThreadPosition p = ThreadPosition::of<kTiles>(m, first_row, hidden);
  float bias[kSlots] = {}, c[kRows] = {}, h[kRows] = {};
  LLTM_UNROLL
  for (int n = 0; n < kRows; ++n) {
    if (!p.is_in(a.batch, n)) continue;
    c[n] = static_cast<float>(a.c_before[p.row(n) * hidden + p.unit]);
    h[n] = static_cast<float>(a.h_before[p.row(n) * hidden + p.unit]);
  }
  if (p.is_unit) load_bias<Definition>(a, p.unit, bias);

  int buffer = 0;
  for_each_step(a.steps, [&](const StepCursor& step) {
    save_checkpoint<kTiles>(a, p, step, c);
    if (step.rows <= first_row) return;
    float z[kRows][kSlots] = {};
    LLTM_UNROLL
    for (int n = 0; n < kRows; ++n) {
      if (!p.is_in(step.rows, n)) continue;
      if (is_reset(a.reset, step.offset + p.row(n))) c[n] = 0;
      constexpr int kOfX = Definition::kCell.x.end;
      const float* const gates =
          a.gates + (step.offset + p.row(n) - a.gates_offset) * kOfX * hidden + p.unit;
      LLTM_UNROLL
      for (int k = 0; k < kOfX; ++k) z[n][k] = gates[k * hidden];
    }

    // The previous step's row, h_0 if the row is new, or zeros.
    const auto source = [&](int tile) -> StateRow<T> {
      const std::int64_t row = first_row + tile * kTileRows + lane / 4;
      if (row >= step.rows || is_reset(a.reset, step.offset + row)) return {nullptr, false};
      if (row >= step.previous_rows) return {a.h_0 + row * hidden, /*polled=*/false};
      return {a.output + (step.previous_offset + row) * hidden, /*polled=*/true};
    };
    Sums* const sums = m.shared() + buffer * (shared_sums<kTiles, kOutputs>() / 2);
    multiply<kTiles, kUnitsK, kOutputs, T>(
        m, weights, tiles_of(step.rows, first_row), hidden, source, sums);
    m.sync_block();

    if (p.warp_is_in(step.rows)) {
      finish_forward<Definition, kTiles>(a, m, p, step, sums, bias, z, c, h);
    }
    // One barrier per step is enough: a warp passes the next before it writes this buffer again.
    buffer = 1 - buffer;
  });

  LLTM_UNROLL
  for (int n = 0; n < kRows; ++n) {
    if (!p.is_in(a.batch, n)) continue;
    a.c[p.row(n) * hidden + p.unit] = static_cast<T>(c[n]);
    a.h[p.row(n) * hidden + p.unit] = narrow<T>(h[n]);
  }
}

// Inputs that do not depend on other thread blocks.
template <typename Definition, typename T>
LLTM_CELL_INLINE void load_step(
    const PersistentBackwardArgs<T>& a,
    const StepCursor& step,
    std::int64_t row,
    std::int64_t unit,
    float (&saved)[Definition::kSaved],
    float& grad_output) {
  const T* const activations =
      a.activations + (step.offset + row) * Definition::kSaved * a.hidden + unit;
  LLTM_UNROLL
  for (int k = 0; k < Definition::kSaved; ++k)
    saved[k] = static_cast<float>(activations[k * a.hidden]);
  const StepMatrix<const T>& g = a.grad_output;
  if (g.data == nullptr) return;
  const std::int64_t at = step.time * g.time_stride + step.offset * g.offset_stride +
                          row * g.row_stride + unit * g.col_stride;
  grad_output = static_cast<float>(g.data[at]);
}

// dz, and the previous time step's dc, from dh.
template <typename Definition, int kTiles, typename T, typename Machine>
LLTM_CELL_INLINE void finish_backward(
    const PersistentBackwardArgs<T>& a,
    Machine& m,
    const ThreadPosition& p,
    const StepCursor& step,
    const float (&saved)[kRowsOfThread<kTiles>][Definition::kSaved],
    const float (&grad_output)[kRowsOfThread<kTiles>],
    const float (&dh)[kRowsOfThread<kTiles>],
    float (&dc)[kRowsOfThread<kTiles>]) {
  constexpr int kRows = kRowsOfThread<kTiles>, kSlots = Definition::kSlots;
  float dc_before[kRows];
  std::uint32_t words[kRows][kSlots];
  LLTM_UNROLL
  for (int n = 0; n < kRows; ++n) {
    const auto d = backward_of<Definition>(saved[n], grad_output[n] + dh[n], dc[n]);
    dc_before[n] = d.dc;
    LLTM_UNROLL
    for (int k = 0; k < kSlots; ++k) words[n][k] = word_of<T>(m, d.dz[k]);
  }
  LLTM_UNROLL
  for (int n = 0; n < kRows; ++n) {
    if (!p.is_in(step.rows, n)) continue;
    dc[n] = is_reset(a.reset, step.offset + p.row(n)) ? 0 : dc_before[n];
    if (!p.has_word()) continue;
    T* const dz = a.dz + (step.offset + p.row(n)) * kSlots * a.hidden + p.unit;
    LLTM_UNROLL
    for (int k = 0; k < kSlots; ++k) m.publish(dz + k * a.hidden, words[n][k]);
  }
}

template <typename Definition, int kUnitsK, int kTiles, typename T, typename Machine>
LLTM_CELL_INLINE void run_steps(const PersistentBackwardArgs<T>& a, Machine& m) {
  constexpr int kSlots = Definition::kSlots, kSaved = Definition::kSaved;
  constexpr int kRows = kRowsOfThread<kTiles>;
  const std::int64_t hidden = a.hidden;
  const std::int64_t first_row = first_row_of<kTiles>(m, a.first_row);
  const int warp = m.thread() / kWarpLanes, lane = m.thread() % kWarpLanes;
  const std::int64_t slice = std::int64_t{m.slice()} * kSliceUnits;
  m.begin();
  const std::int64_t k_size = kRecurrent<Definition> * hidden;

  WeightFragments<kUnitsK> weights[1];
  weights[0].load(a.weights + slice * k_size, hidden - slice, k_size, warp, lane);

  const ThreadPosition p = ThreadPosition::of<kTiles>(m, first_row, hidden);
  float dh[kRows] = {}, dc[kRows] = {};
  LLTM_UNROLL
  for (int n = 0; n < kRows; ++n) {
    if (!p.is_in(a.batch, n)) continue;
    if (a.dh_before != nullptr) dh[n] = a.dh_before[p.row(n) * hidden + p.unit];
    if (a.dc_before != nullptr) dc[n] = a.dc_before[p.row(n) * hidden + p.unit];
  }

  int buffer = 0;
  for_each_step(a.steps, [&](const StepCursor& step) {
    float saved[kRows][kSaved] = {}, grad_output[kRows] = {};
    LLTM_UNROLL
    for (int n = 0; n < kRows; ++n) {
      if (p.is_in(step.rows, n)) {
        load_step<Definition>(a, step, p.row(n), p.unit, saved[n], grad_output[n]);
      }
    }

    // The gradient through h for the rows in the step that backward processed before.
    if (step.previous_rows > first_row) {
      const auto source = [&](int tile) -> StateRow<T> {
        const std::int64_t row = first_row + tile * kTileRows + lane / 4;
        const std::int64_t previous = step.previous_offset + row;
        if (row >= step.previous_rows || is_reset(a.reset, previous)) return {nullptr, false};
        const T* const dz = a.dz + (previous * kSlots + Definition::kCell.h.begin) * hidden;
        return {dz, /*polled=*/true};
      };
      Sums* const sums = m.shared() + buffer * (shared_sums<kTiles, 1>() / 2);
      multiply<kTiles, kUnitsK, 1, T>(
          m, weights, tiles_of(step.previous_rows, first_row), k_size, source, sums);
      m.sync_block();
      LLTM_UNROLL
      for (int n = 0; n < kRows; ++n) {
        if (!p.is_in(step.previous_rows, n)) continue;
        dh[n] = 0;
        add_sums<kTiles, 1>(sums, p, n, 0, dh[n]);
      }
      buffer = 1 - buffer;  // as in forward
    }

    if (p.warp_is_in(step.rows)) {
      finish_backward<Definition, kTiles>(a, m, p, step, saved, grad_output, dh, dc);
    }
  });

  LLTM_UNROLL
  for (int n = 0; n < kRows; ++n) {
    if (!p.is_in(a.batch, n)) continue;
    a.dh[p.row(n) * hidden + p.unit] = dh[n];
    a.dc[p.row(n) * hidden + p.unit] = dc[n];
  }
}

// Supported K per warp, in units of kWarpUnits. Backward's K is a multiple of H.
template <int... n>
std::integer_sequence<int, 1 + n...> counted_from_1(std::integer_sequence<int, n...>);
template <typename Definition>
using ForwardUnitsK = decltype(counted_from_1(
    std::make_integer_sequence<int, most_units_forward(Definition::kCell)>()));
template <typename Definition>
using BackwardUnitsK = std::conditional_t<
    kRecurrent<Definition> == 4,
    std::integer_sequence<int, 2, 4, 8, kMostUnitsBackward>,
    std::integer_sequence<int, 2, 3, 6, 9, kMostUnitsBackward>>;

// The smallest sufficient number.
template <int... kUnitsK, typename Body>
void visit_units_k(std::integer_sequence<int, kUnitsK...>, std::int64_t k_size, const Body& body) {
  const std::int64_t needed = (k_size + kWarps * kWarpUnits - 1) / (kWarps * kWarpUnits);
  bool found = false;
  ((!found && needed <= kUnitsK ? (found = true, body(std::integral_constant<int, kUnitsK>()))
                                : void()),
   ...);
}

template <typename Body>
void visit_tiles(int tiles, const Body& body) {
  [&]<std::size_t... n>(std::index_sequence<n...>) {
    ((tiles == kTileCounts[n] ? body(std::integral_constant<int, kTileCounts[n]>()) : void()), ...);
  }(std::make_index_sequence<std::size(kTileCounts)>());
}

template <typename Definition, typename Args, typename Body>
void visit_kernel(std::int64_t hidden, int tiles, const Body& body) {
  using UnitsK =
      std::conditional_t<Args::kIsForward, ForwardUnitsK<Definition>, BackwardUnitsK<Definition>>;
  const std::int64_t k_size = Args::kIsForward ? hidden : kRecurrent<Definition> * hidden;
  visit_units_k(
      UnitsK(), k_size, [&](auto units) { visit_tiles(tiles, [&](auto t) { body(units, t); }); });
}

}  // namespace
}  // namespace lltm::cuda
