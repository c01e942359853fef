// The code of one thread of a persistent kernel, for host and device: templates over the page of a
// cell (cell.h) and a `Machine`, which is what a GPU does for it: indices, shared memory, barriers,
// matrix products, and memory that other thread blocks write meanwhile. In persistent_launch.h it
// is the GPU; in the tests, the CPU.
//
//     int slice() const, group() const, thread() const
//     Sums* shared() const                       shared_sums() of them
//     void sync_warp(), sync_block()
//     Words read(const void*)                    16 bytes that may be written meanwhile
//     void publish(void*, const std::uint32_t (&)[n])
//                                                4 bytes, or 8, that may be read meanwhile
//     bool wait(int polls)                       between two polls; false after very many, which
//                                                it reports, and from then on at once
//     std::uint32_t operand<T>(std::uint32_t)    a word as mma<T> reads it: float32 rounded
//                                                to TF32, anything else as it is
//     void mma<T>(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t, std::uint32_t)
//                                                d += a b, by a whole warp: mma.m16n8k16 of
//                                                16 bits, mma.m16n8k8 of TF32
//
// The layouts of the two instructions are the same, word by word: where one has two elements of
// 16 bits, the other has one of 32. So in everything below K is counted in words, or in bytes,
// and a dtype shows only where an element is read or written.
//
// Where all lanes of a warp have to take part (mma, sync_warp), and all threads of a block
// (sync_block), conditions are the same for all of them.
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

// How many slots read h: the outputs of forward's product, and in backward the blocks of K.
template <typename Page>
constexpr int kRecurrent = Page::kCell.h.count();

// ---- words ------------------------------------------------------------------

// Two neighbouring units of 16 bits, or one of 32.
constexpr std::uint32_t kAbsent = 0xFFFFFFFF;

struct alignas(16) Words {
  std::uint32_t w[4];
};

template <typename T>
struct Pair {
  T values[2];
};

template <typename T>
struct PairWords {
  std::uint32_t w[sizeof(Pair<T>) / sizeof(std::uint32_t)];
};

// Of any type, moved by one instruction: as a pair, it would be two.
using Word [[gnu::may_alias]] = std::uint32_t;
using LongWord [[gnu::may_alias]] = std::uint64_t;

LLTM_CELL_INLINE bool is_there(const Words& x) {
  return x.w[0] != kAbsent && x.w[1] != kAbsent && x.w[2] != kAbsent && x.w[3] != kAbsent;
}

// The one NaN, in all formats.
template <typename T>
using Bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint16_t>;
template <typename T>
constexpr Bits<T> kNaN = static_cast<Bits<T>>(0x7FFFFFFF >> (32 - 8 * sizeof(T)));

template <typename T>
LLTM_CELL_INLINE Words nan_words() {
  constexpr std::uint32_t kWord = sizeof(T) == 4 ? kNaN<T> : std::uint32_t{kNaN<T>} << 16 | kNaN<T>;
  return {{kWord, kWord, kWord, kWord}};
}

// Rounded; every NaN becomes the same, so that none, and no two, make an absent word.
template <typename T>
LLTM_CELL_INLINE T narrow(float x) {
  return x == x ? static_cast<T>(x) : math::bit_cast<T>(kNaN<T>);
}

template <typename T>
LLTM_CELL_INLINE PairWords<T> words_of(const float (&values)[2]) {
  return math::bit_cast<PairWords<T>>(Pair<T>{{narrow<T>(values[0]), narrow<T>(values[1])}});
}

template <typename T>
LLTM_CELL_INLINE void load_pair(const T* x, float (&values)[2]) {
  Pair<T> pair;
  if constexpr (sizeof(pair) == sizeof(LongWord)) {
    pair = math::bit_cast<Pair<T>>(*reinterpret_cast<const LongWord*>(x));
  } else {
    pair = math::bit_cast<Pair<T>>(*reinterpret_cast<const Word*>(x));
  }
  values[0] = static_cast<float>(pair.values[0]);
  values[1] = static_cast<float>(pair.values[1]);
}

template <typename T>
LLTM_CELL_INLINE void store_pair(T* x, const float (&values)[2]) {
  const PairWords<T> words = words_of<T>(values);
  if constexpr (sizeof(words) == sizeof(LongWord)) {
    *reinterpret_cast<LongWord*>(x) = math::bit_cast<std::uint64_t>(words);
  } else {
    *reinterpret_cast<Word*>(x) = words.w[0];
  }
}

// ---- steps ------------------------------------------------------------------

// A step of LaunchSteps, and the one before it.
struct StepCursor {
  bool ascending;
  std::int64_t edge, time;  // as in LaunchSteps, of the next step
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

// ---- which thread has what --------------------------------------------------

// What two neighbouring units of one row got from the K of one warp.
struct alignas(8) Sums {
  float values[2];
};

// Two buffers: the element-wise part of a step reads one while warps that are ahead write
// the other.
template <int kTiles, int kOutputs>
LLTM_CELL_INLINE constexpr int shared_sums() {
  return 2 * kWarps * kTiles * kOutputs * 2 * kWarpLanes;
}

// Of the element-wise part: a thread has two neighbouring units of one row, those that one
// lane has of the result of mma.
struct Place {
  bool takes_part;
  int tile, half, lane;
  std::int64_t row, unit;

  template <int kTiles, typename Machine>
  static LLTM_CELL_INLINE Place of(const Machine& m, std::int64_t first_row) {
    Place p;
    p.tile = m.thread() / 64;
    p.half = m.thread() % 64 / kWarpLanes;
    p.lane = m.thread() % kWarpLanes;
    p.row = first_row + p.tile * kTileRows + 2 * (p.lane % 4) + p.half;
    p.unit = std::int64_t{m.slice()} * kSliceUnits + 2 * (p.lane / 4);
    p.takes_part = p.tile < kTiles;
    return p;
  }
};

// The first row of a thread block.
template <int kTiles, typename Machine>
LLTM_CELL_INLINE std::int64_t first_row_of(const Machine& m, std::int64_t first_row) {
  return first_row + std::int64_t{m.group()} * kTiles * kTileRows;
}

// ---- the recurrent product --------------------------------------------------

// K is divided into units of kWarpBytes, dealt to the warps in turn. Within one, K is permuted,
// for A and B alike: lane % 4 = q has bytes 16q to 16q+15, so that 16 bytes of a row of B are the
// operands of two mma.
template <typename T>
LLTM_CELL_INLINE std::int64_t k_of(int warp, int lane, int j) {
  const std::int64_t byte = std::int64_t{kWarpBytes} * (warp + kWarps * j) + 16 * (lane % 4);
  return byte / static_cast<std::int64_t>(sizeof(T));
}

// A: a matrix (kSliceUnits, K) whose rows are units. Row r of A's tile is unit 2r, and row
// r + 8 unit 2r + 1, so that a lane gets two neighbouring units of the result.
template <int kUnitsK>
struct Weights {
  std::uint32_t a[kUnitsK][2][4];

  // `units` rows are there, `k_size` elements apart; the others count as zero.
  template <typename T, typename Machine>
  LLTM_CELL_INLINE void load(
      Machine& m, const T* rows, std::int64_t units, std::int64_t k_size, int warp, int lane) {
    LLTM_UNROLL
    for (int j = 0; j < kUnitsK; ++j) {
      const std::int64_t k = k_of<T>(warp, lane, j);
      LLTM_UNROLL
      for (int odd = 0; odd < 2; ++odd) {
        const std::int64_t unit = 2 * (lane / 4) + odd;
        Words x = {};
        if (k < k_size && unit < units) {
          x = math::bit_cast<Words>(*reinterpret_cast<const Access<T>*>(rows + unit * k_size + k));
        }
        LLTM_UNROLL
        for (int part = 0; part < 2; ++part) {
          a[j][part][odd] = m.template operand<T>(x.w[2 * part]);
          a[j][part][2 + odd] = m.template operand<T>(x.w[2 * part + 1]);
        }
      }
    }
  }
};

// B: lane / 4 is a row of the tile.
template <int kUnitsK>
struct States {
  Words x[kUnitsK];

  // Null rows are zero.
  template <typename T, typename Machine>
  LLTM_CELL_INLINE void load(Machine& m, const T* row, std::int64_t k_size, int warp, int lane) {
    LLTM_UNROLL
    for (int j = 0; j < kUnitsK; ++j) {
      const std::int64_t k = k_of<T>(warp, lane, j);
      x[j] = row != nullptr && k < k_size ? m.read(row + k) : Words{};
    }
  }

  // Until all of it is there. What is absent is read again together, so that a round trip to memory
  // is made once for all of it. What never comes is NaN: the lane goes on as any other, so that all
  // barriers are met, all results published, and the grid ends.
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
        if (absent[j]) x[j] = goes_on ? m.read(row + k_of<T>(warp, lane, j)) : nan_words<T>();
      }
    }
  }
};

// A row of a state, and whether other thread blocks may still be writing it.
template <typename T>
struct Source {
  const T* row;
  bool polled;
};

// Two tiles in flight hide the latency of reading, where registers are left: rounding float to
// TF32 takes some.
template <typename T, int kUnitsK, int kTiles, int kOutputs>
constexpr bool kReadsAhead = kTiles > 1 && (kOutputs + 1) * kUnitsK <= (sizeof(T) == 4 ? 20 : 22);

// A chain of mma waits for each sum before the next. Where one output makes too few chains to fill
// the matrix units, it has several, as far as registers go.
template <int kUnitsK, int kOutputs>
constexpr int kChains = kOutputs > 1 || kUnitsK == 1 ? 1
                        : kUnitsK < 12               ? 4
                                                     : 2;

// The sums of products of `tiles` tiles (the same number for all threads), into `sums`.
// source(tile) is this lane's row of the state.
template <int kTiles, int kUnitsK, int kOutputs, typename T, typename Machine, typename Rows>
LLTM_CELL_INLINE void multiply(
    Machine& m,
    const Weights<kUnitsK> (&weights)[kOutputs],
    std::int64_t tiles,
    std::int64_t k_size,
    const Rows& source,
    Sums* sums) {
  constexpr bool kAhead = kReadsAhead<T, kUnitsK, kTiles, kOutputs>;
  constexpr int kParts = kChains<kUnitsK, kOutputs>;
  const int warp = m.thread() / kWarpLanes, lane = m.thread() % kWarpLanes;
  States<kUnitsK> states[kAhead ? 2 : 1];
  if (kAhead) states[0].load(m, source(0).row, k_size, warp, lane);
  LLTM_UNROLL
  for (int tile = 0; tile < kTiles; ++tile) {
    if (tile < tiles) {
      States<kUnitsK>& now = states[kAhead ? tile % 2 : 0];
      const Source<T> from = source(tile);
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
          const std::uint32_t b0 = m.template operand<T>(now.x[j].w[2 * part]);
          const std::uint32_t b1 = m.template operand<T>(now.x[j].w[2 * part + 1]);
          LLTM_UNROLL
          for (int n = 0; n < kOutputs; ++n) {
            m.template mma<T>(d[n][(2 * j + part) % kParts], weights[n].a[j][part], b0, b1);
          }
        }
      }
      Sums* const mine = sums + (warp * kTiles + tile) * kOutputs * 2 * kWarpLanes;
      LLTM_UNROLL
      for (int n = 0; n < kOutputs; ++n) {
        float (&sum)[4] = d[n][0];
        LLTM_UNROLL
        for (int chain = 1; chain < kParts; ++chain) {
          LLTM_UNROLL
          for (int k = 0; k < 4; ++k) sum[k] += d[n][chain][k];
        }
        mine[(2 * n + 0) * kWarpLanes + lane] = {{sum[0], sum[2]}};
        mine[(2 * n + 1) * kWarpLanes + lane] = {{sum[1], sum[3]}};
      }
    }
  }
}

// Adds what the warps have computed for output n of a place, always in the same order.
template <int kTiles, int kOutputs>
LLTM_CELL_INLINE void add_sums(const Sums* sums, const Place& p, int n, float (&to)[2]) {
  LLTM_UNROLL
  for (int warp = 0; warp < kWarps; ++warp) {
    const int block = (warp * kTiles + p.tile) * kOutputs + n;
    const Sums s = sums[(2 * block + p.half) * kWarpLanes + p.lane];
    to[0] += s.values[0];
    to[1] += s.values[1];
  }
}

LLTM_CELL_INLINE std::int64_t tiles_of(std::int64_t rows, std::int64_t first_row) {
  return (rows - first_row + kTileRows - 1) / kTileRows;
}

// ---- forward ----------------------------------------------------------------

// The element-wise part: from the sums of a place's products, and z without them, to h' and c'.
// `row` is one of the input.
template <typename Page, int kTiles, typename T, typename Machine>
LLTM_CELL_INLINE void finish_forward(
    const PersistentForwardArgs<T>& a,
    Machine& m,
    const Place& p,
    std::int64_t row,
    const Sums* sums,
    const float (&bias)[Page::kSlots][2],
    float (&z)[Page::kSlots][2],
    float (&c)[2],
    float (&h)[2]) {
  constexpr int kSlots = Page::kSlots, kSaved = Page::kSaved;
  float saved[kSaved][2];
  for_each_index<kSlots>([&](auto slot) {
    constexpr int k = slot;
    z[k][0] += bias[k][0];
    z[k][1] += bias[k][1];
    if constexpr (Page::kCell.h.contains(k)) {
      add_sums<kTiles, kRecurrent<Page>>(sums, p, k - Page::kCell.h.begin, z[k]);
    }
  });
  LLTM_UNROLL
  for (int j = 0; j < 2; ++j) {
    float z_j[kSlots];
    LLTM_UNROLL
    for (int k = 0; k < kSlots; ++k) z_j[k] = z[k][j];
    const auto y = Page::forward(z_j, c[j]);
    LLTM_UNROLL
    for (int k = 0; k < kSaved; ++k) saved[k][j] = y.saved[k];
    h[j] = y.h;
    // As it is stored at the end of a launch: chunks of steps give what all give.
    c[j] = static_cast<float>(static_cast<T>(y.c));
  }
  m.publish(a.output + row * a.hidden + p.unit, words_of<T>(h).w);
  if (a.activations != nullptr) {
    T* const activations = a.activations + row * kSaved * a.hidden + p.unit;
    LLTM_UNROLL
    for (int k = 0; k < kSaved; ++k) store_pair(activations + k * a.hidden, saved[k]);
  }
}

template <typename Page, int kUnitsK, int kTiles, typename T, typename Machine>
LLTM_CELL_INLINE void persistent_forward(const PersistentForwardArgs<T>& a, Machine& m) {
  constexpr int kSlots = Page::kSlots, kOutputs = kRecurrent<Page>;
  const std::int64_t hidden = a.hidden;
  const std::int64_t first_row = first_row_of<kTiles>(m, a.first_row);
  const int warp = m.thread() / kWarpLanes, lane = m.thread() % kWarpLanes;
  const std::int64_t slice = std::int64_t{m.slice()} * kSliceUnits;

  Weights<kUnitsK> weights[kOutputs];
  LLTM_UNROLL
  for (int k = 0; k < kOutputs; ++k) {
    const T* const rows = a.weights + (k * hidden + slice) * hidden;
    weights[k].load(m, rows, hidden - slice, hidden, warp, lane);
  }

  const Place p = Place::of<kTiles>(m, first_row);
  const bool has_state = p.takes_part && p.row < a.batch && p.unit < hidden;
  float bias[kSlots][2] = {}, c[2] = {}, h[2] = {};
  if (has_state) {
    load_pair(a.c + p.row * hidden + p.unit, c);
    load_pair(a.h + p.row * hidden + p.unit, h);
    for_each_index<kSlots>([&](auto slot) {
      constexpr int k = slot, of_x = Page::kCell.x_blocks[k], of_h = Page::kCell.h_blocks[k];
      const auto add = [&](const Matrix<const T>& given, int block) {
        float b[2];
        load(given, false, 0, block * hidden + p.unit, b);
        bias[k][0] += b[0];
        bias[k][1] += b[1];
      };
      if constexpr (Page::kCell.x.contains(k)) add(a.bias_ih, of_x);
      if constexpr (Page::kCell.h.contains(k)) add(a.bias_hh, of_h);
    });
  }

  int buffer = 0;
  for_each_step(a.steps, [&](const StepCursor& step) {
    if (step.rows <= first_row) return;
    const bool is_mine = has_state && p.row < step.rows;
    float z[kSlots][2] = {};
    if (is_mine) {
      constexpr int kOfX = Page::kCell.x.end;
      const float* const gates =
          a.gates + (step.offset + p.row - a.gates_offset) * kOfX * hidden + p.unit;
      LLTM_UNROLL
      for (int k = 0; k < kOfX; ++k) load_pair(gates + k * hidden, z[k]);
    }

    // A row that the step before had goes on from there, another from h_0.
    const auto source = [&](int tile) -> Source<T> {
      const std::int64_t row = first_row + tile * kTileRows + lane / 4;
      if (row < step.previous_rows && row < step.rows) {
        return {a.output + (step.previous_offset + row) * hidden, /*polled=*/true};
      }
      return {row < step.rows ? a.h_0 + row * hidden : nullptr, /*polled=*/false};
    };
    Sums* const sums = m.shared() + buffer * (shared_sums<kTiles, kOutputs>() / 2);
    multiply<kTiles, kUnitsK, kOutputs, T>(
        m, weights, tiles_of(step.rows, first_row), hidden, source, sums);
    m.sync_block();

    if (is_mine) finish_forward<Page, kTiles>(a, m, p, step.offset + p.row, sums, bias, z, c, h);
    // One barrier a step is enough: a warp that writes this buffer again has passed the next one.
    buffer = 1 - buffer;
  });

  if (has_state) {
    store_pair(a.c + p.row * hidden + p.unit, c);
    store_pair(a.h + p.row * hidden + p.unit, h);
  }
}

// ---- backward ---------------------------------------------------------------

// The element-wise part: from dh of a place to dz, and dc of the step before. `row` is one of the
// input.
template <typename Page, typename T, typename Machine>
LLTM_CELL_INLINE void finish_backward(
    const PersistentBackwardArgs<T>& a,
    Machine& m,
    const Place& p,
    std::int64_t row,
    const float (&saved)[Page::kSaved][2],
    const float (&dh)[2],
    float (&dc)[2]) {
  constexpr int kSlots = Page::kSlots, kSaved = Page::kSaved;
  float dz[kSlots][2];
  LLTM_UNROLL
  for (int j = 0; j < 2; ++j) {
    float saved_j[kSaved];
    LLTM_UNROLL
    for (int k = 0; k < kSaved; ++k) saved_j[k] = saved[k][j];
    const auto d = Page::backward(saved_j, dh[j], dc[j]);
    LLTM_UNROLL
    for (int k = 0; k < kSlots; ++k) dz[k][j] = d.dz[k];
    dc[j] = d.dc;
  }
  LLTM_UNROLL
  for (int k = 0; k < kSlots; ++k) {
    m.publish(a.dz + (row * kSlots + k) * a.hidden + p.unit, words_of<T>(dz[k]).w);
  }
}

template <typename Page, int kUnitsK, int kTiles, typename T, typename Machine>
LLTM_CELL_INLINE void persistent_backward(const PersistentBackwardArgs<T>& a, Machine& m) {
  constexpr int kSlots = Page::kSlots, kSaved = Page::kSaved;
  const std::int64_t hidden = a.hidden;
  const std::int64_t first_row = first_row_of<kTiles>(m, a.first_row);
  const int warp = m.thread() / kWarpLanes, lane = m.thread() % kWarpLanes;
  const std::int64_t slice = std::int64_t{m.slice()} * kSliceUnits;
  const std::int64_t k_size = kRecurrent<Page> * hidden;

  Weights<kUnitsK> weights[1];
  weights[0].load(m, a.weights + slice * k_size, hidden - slice, k_size, warp, lane);

  const Place p = Place::of<kTiles>(m, first_row);
  const bool has_state = p.takes_part && p.row < a.batch && p.unit < hidden;
  float dh[2] = {}, dc[2] = {};
  if (has_state) {
    load_pair(a.dh + p.row * hidden + p.unit, dh);
    load_pair(a.dc + p.row * hidden + p.unit, dc);
  }

  int buffer = 0;
  for_each_step(a.steps, [&](const StepCursor& step) {
    const bool is_mine = has_state && p.row < step.rows;
    float saved[kSaved][2] = {}, grad_output[2] = {};
    if (is_mine) {
      const T* const activations = a.activations + (step.offset + p.row) * kSaved * hidden + p.unit;
      LLTM_UNROLL
      for (int k = 0; k < kSaved; ++k) load_pair(activations + k * hidden, saved[k]);
      if (a.grad_output.data != nullptr) {
        const StepMatrix<const T>& g = a.grad_output;
        const T* const x = g.data + step.time * g.time_stride + step.offset * g.offset_stride +
                           p.row * g.row_stride + p.unit * g.col_stride;
        grad_output[0] = static_cast<float>(x[0]);
        grad_output[1] = static_cast<float>(x[g.col_stride]);
      }
    }

    // Of the rows that the step had which backward comes from: through h.
    if (step.previous_rows > first_row) {
      const auto source = [&](int tile) -> Source<T> {
        const std::int64_t row = first_row + tile * kTileRows + lane / 4;
        if (row >= step.previous_rows) return {nullptr, /*polled=*/false};
        const std::int64_t offset = (step.previous_offset + row) * kSlots + Page::kCell.h.begin;
        return {a.dz + offset * hidden, /*polled=*/true};
      };
      Sums* const sums = m.shared() + buffer * (shared_sums<kTiles, 1>() / 2);
      multiply<kTiles, kUnitsK, 1, T>(
          m, weights, tiles_of(step.previous_rows, first_row), k_size, source, sums);
      m.sync_block();
      if (has_state && p.row < step.previous_rows) {
        dh[0] = dh[1] = 0;
        add_sums<kTiles, 1>(sums, p, 0, dh);
      }
      buffer = 1 - buffer;  // as in forward
    }

    if (is_mine) {
      const float sum[2] = {grad_output[0] + dh[0], grad_output[1] + dh[1]};
      finish_backward<Page>(a, m, p, step.offset + p.row, saved, sum, dc);
    }
  });

  if (has_state) {
    store_pair(a.dh + p.row * hidden + p.unit, dh);
    store_pair(a.dc + p.row * hidden + p.unit, dc);
  }
}

// ---- which kernels there are ------------------------------------------------

// How many units of K a warp has, at most. In forward K is H and each number has its kernel;
// in backward it is a multiple of H, and there are some.
template <int... n>
std::integer_sequence<int, 1 + n...> counted_from_1(std::integer_sequence<int, n...>);
template <typename Page>
using ForwardUnitsK =
    decltype(counted_from_1(std::make_integer_sequence<int, most_units_forward(Page::kCell)>()));
template <typename Page>
using BackwardUnitsK = std::conditional_t<
    kRecurrent<Page> == 4,
    std::integer_sequence<int, 2, 4, 8, kMostUnitsBackward>,
    std::integer_sequence<int, 2, 3, 6, 9, kMostUnitsBackward>>;

// Calls body with the smallest of them that is enough for so many bytes of K, as a constant.
template <int... kUnitsK, typename Body>
void visit_units_k(std::integer_sequence<int, kUnitsK...>, std::int64_t bytes, const Body& body) {
  const std::int64_t needed = (bytes + kWarps * kWarpBytes - 1) / (kWarps * kWarpBytes);
  bool found = false;
  ((!found && needed <= kUnitsK ? (found = true, body(std::integral_constant<int, kUnitsK>()))
                                : void()),
   ...);
}

// Calls body with the number of tiles as a constant: one of kTileCounts.
template <typename Body>
void visit_tiles(int tiles, const Body& body) {
  [&]<std::size_t... n>(std::index_sequence<n...>) {
    ((tiles == kTileCounts[n] ? body(std::integral_constant<int, kTileCounts[n]>()) : void()), ...);
  }(std::make_index_sequence<std::size(kTileCounts)>());
}

// Calls body(units of K, tiles), both as constants.
template <typename Page, typename T, typename Body>
void visit_forward_kernel(std::int64_t hidden, int tiles, const Body& body) {
  const std::int64_t bytes = hidden * static_cast<std::int64_t>(sizeof(T));
  visit_units_k(ForwardUnitsK<Page>(), bytes, [&](auto units_k) {
    visit_tiles(tiles, [&](auto t) { body(units_k, t); });
  });
}
template <typename Page, typename T, typename Body>
void visit_backward_kernel(std::int64_t hidden, int tiles, const Body& body) {
  const std::int64_t bytes = kRecurrent<Page> * hidden * static_cast<std::int64_t>(sizeof(T));
  visit_units_k(BackwardUnitsK<Page>(), bytes, [&](auto units_k) {
    visit_tiles(tiles, [&](auto t) { body(units_k, t); });
  });
}

}  // namespace
}  // namespace lltm::cuda
