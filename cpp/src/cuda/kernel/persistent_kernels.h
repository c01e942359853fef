// One thread's code in a persistent kernel.
#pragma once

#include "cuda/kernel/persistent_gpu.h"

#define LLTM_PRAGMA(text) _Pragma(#text)
#define LLTM_UNROLL_BY(n) LLTM_PRAGMA(unroll(n))

namespace lltm::cuda {
namespace {

// Pre-activations that depend on h: outputs of forward's recurrent GEMM, blocks in backward's K.
template <typename Cell>
constexpr int kRecurrent = Cell::kCell.h.count();

// Without branches: a step checks all words of a lane.
LLTM_CELL_INLINE bool is_absent(const Words& x) {
  const std::uint32_t a = x.w[0] > x.w[1] ? x.w[0] : x.w[1], b = x.w[2] > x.w[3] ? x.w[2] : x.w[3];
  return (a > b ? a : b) == kAbsent;
}

// The only stored NaN. Two units never form an absent word.
template <typename T>
using Bits = std::conditional_t<kIsWord<T>, std::uint32_t, std::uint16_t>;
template <typename T>
constexpr auto kNaN = static_cast<Bits<T>>(kIsWord<T> ? 0x7FFFFFFF : 0x7FFF);
constexpr std::uint32_t kNaNs = 0x7FFF7FFF;  // in every dtype
constexpr Words kNaNWords = {{kNaNs, kNaNs, kNaNs, kNaNs}};

template <typename T>
LLTM_CELL_INLINE T narrow(float x) {
  return x == x ? static_cast<T>(x) : math::bit_cast<T>(kNaN<T>);
}

// This lane's unit, in 16 bits with the next lane's; valid in lanes that have a word. Called by
// full warps.
template <typename T>
LLTM_CELL_INLINE std::uint32_t word_of(Gpu& m, float value) {
  const std::uint32_t bits = math::bit_cast<Bits<T>>(narrow<T>(value));
  if constexpr (kIsWord<T>) {
    return bits;
  } else {
    return bits | m.neighbor(bits) << 16;
  }
}

struct StepCursor {
  bool ascending;
  int edge, time;  // as in LaunchSteps, for the next step
  int offset, rows, previous_offset, previous_rows;

  LLTM_CELL_INLINE explicit StepCursor(const LaunchSteps& steps)
      : ascending(steps.ascending),
        edge(steps.edge),
        time(steps.ascending ? steps.time - 1 : steps.time + 1),
        offset(steps.previous_offset),
        rows(steps.previous_rows),
        previous_offset(0),
        previous_rows(0) {}

  LLTM_CELL_INLINE void advance(int next_rows) {
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
    for (int k = 0; k < run.count; ++k) {
      cursor.advance(run.rows);
      body(cursor);
    }
  }
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
  int warp_row, first_row, unit;

  template <int kTiles>
  static LLTM_CELL_INLINE ThreadPosition of(const Gpu& m, int first_row, int hidden) {
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
    p.unit = m.slice() * kSliceUnits + unit;
    p.is_unit = p.takes_part && p.unit < hidden;
    return p;
  }

  LLTM_CELL_INLINE int row(int n) const { return first_row + n * kTilesAtOnce * kTileRows; }
  // This row (is_in) or any of the warp's rows (warp_is_in).
  LLTM_CELL_INLINE bool is_in(int rows, int n) const { return is_unit && row(n) < rows; }
  LLTM_CELL_INLINE bool warp_is_in(int rows) const { return takes_part && warp_row < rows; }
  template <typename T>
  LLTM_CELL_INLINE bool has_word() const {
    return kIsWord<T> || odd == 0;
  }
};

template <int kTiles>
LLTM_CELL_INLINE int first_row_of(const Gpu& m, int first_row) {
  return first_row + m.group() * kTiles * kTileRows;
}

// The first element of a row.
LLTM_CELL_INLINE std::int64_t offset_of(int row, int columns) {
  return std::int64_t{row} * columns;
}

// Warps get units of kWarpUnits elements of K, round-robin. Within a unit, K is permuted for A and
// B: lane % 4 has 16 adjacent bytes in a row of B, operands for two mma.
template <typename T>
LLTM_CELL_INLINE int k_of(int warp, int lane, int j) {
  return kWarpUnits<T> * (warp + kWarps * j) + kLaneUnits<T> * (lane % 4);
}

// A (kSliceUnits, K), hidden units as rows; zero outside (units, k_size).
template <typename T>
struct WeightRows {
  const T* rows;
  int units, k_size;

  LLTM_CELL_INLINE Words read(int unit, int k) const {
    if (k >= k_size || unit >= units) return {};
    return math::bit_cast<Words>(*reinterpret_cast<const Access<T>*>(rows + unit * k_size + k));
  }

  // Row r in a fragment is unit 2r, row r + 8 unit 2r + 1: a lane gets two adjacent units of the
  // result.
  LLTM_CELL_INLINE void load(Words (&fragments)[2], int j, int warp, int lane) const {
    LLTM_UNROLL
    for (int odd = 0; odd < 2; ++odd) {
      const Words x = read(2 * (lane / 4) + odd, k_of<T>(warp, lane, j));
      LLTM_UNROLL
      for (int part = 0; part < 2; ++part) {
        fragments[part].w[odd] = x.w[2 * part];
        fragments[part].w[2 + odd] = x.w[2 * part + 1];
      }
    }
  }
};

// Of a warp. Units of K after kUnitsK are in shared memory, of which a lane reads only its words.
template <int kUnitsK, int kSharedK, int kOutputs>
struct WeightFragments {
  Words a[kOutputs][kUnitsK][2];

  // rows(n) has the weights of an output.
  template <typename T, bool kTf32, typename Rows>
  LLTM_CELL_INLINE void load(const Gpu& m, const Rows& rows, Words* shared, int warp, int lane) {
    const auto load_unit = [&](const WeightRows<T>& of, Words(&fragments)[2], int j) {
      of.load(fragments, j, warp, lane);
      LLTM_UNROLL
      for (Words& words : fragments) words = Gpu::weights<T, kTf32>(words);
    };
    LLTM_UNROLL
    for (int n = 0; n < kOutputs; ++n) {
      const WeightRows<T> of = rows(n);
      LLTM_UNROLL
      for (int j = 0; j < kUnitsK; ++j) load_unit(of, a[n][j], j);
      LLTM_UNROLL_BY(1)
      for (int j = 0; j < kSharedK; ++j) {
        Words fragments[2];
        load_unit(of, fragments, kUnitsK + j);
        LLTM_UNROLL
        for (int part = 0; part < 2; ++part)
          shared[place(n, j, part, warp, lane)] = fragments[part];
      }
    }
  }

  static LLTM_CELL_INLINE int place(int n, int j, int part, int warp, int lane) {
    return (((warp * kOutputs + n) * kSharedK + j) * 2 + part) * kWarpLanes + lane;
  }
};

// `polled`: other thread blocks may still be writing the row. Null is a row of zeros.
template <typename T>
struct StateRow {
  const T* row = nullptr;
  bool polled = false;

  // k is the lane's first, to which constants are added: they become parts of instructions.
  LLTM_CELL_INLINE const T* at(int k, int more) const { return row + k + more; }
};

// Of a head, in backward: K has parts of `units` elements, one per gate, with `skipped` elements of
// other heads between them.
template <typename T>
struct HeadRow : StateRow<T> {
  std::uint32_t per_unit = 0;  // 2^32 / units, rounded up
  int skipped = 0;

  LLTM_CELL_INLINE const T* at(int first, int more) const {
    const int k = first + more;
    const std::uint64_t part = std::uint64_t{static_cast<std::uint32_t>(k)} * per_unit >> 32;
    return this->row + k + static_cast<int>(part) * skipped;
  }
};

// B: lane / 4 is a row in the tile. Units [first, first + kUnitsK) of the warp.
template <typename T, int kUnitsK>
struct States {
  Words x[kUnitsK];

  template <typename Row>
  LLTM_CELL_INLINE void load(Gpu& m, const Row& from, int k_size, int warp, int lane, int first) {
    const int k = k_of<T>(warp, lane, first);
    LLTM_UNROLL
    for (int j = 0; j < kUnitsK; ++j) {
      const int more = k_of<T>(0, 0, j);
      x[j] = from.row != nullptr && k < k_size - more ? m.read(from.at(k, more)) : Words{};
    }
  }
};

// Polls until all words are present. Absent words are read again together, to share a round trip.
// After a timeout, missing words become NaN and the lane continues, so that the grid ends. rows[n]
// is the row of states[n].
template <int kCount, int kUnitsK, typename T, typename Row>
LLTM_CELL_INLINE void poll(
    Gpu& m, States<T, kUnitsK>* states, const Row* rows, int warp, int lane, int first = 0) {
  for (int polls = 0;;) {
    bool any = false;
    LLTM_UNROLL
    for (int n = 0; n < kCount; ++n) {
      bool absent = false;
      LLTM_UNROLL
      for (int j = 0; j < kUnitsK; ++j) absent |= is_absent(states[n].x[j]);
      any = any || (rows[n].polled && absent);
    }
    if (__builtin_expect(!any, 1)) return;
    const bool goes_on = m.wait(polls);
    const int k = k_of<T>(warp, lane, first);
    LLTM_UNROLL
    for (int n = 0; n < kCount; ++n) {
      LLTM_UNROLL
      for (int j = 0; j < kUnitsK; ++j) {
        if (!rows[n].polled || !is_absent(states[n].x[j])) continue;
        states[n].x[j] = goes_on ? m.read(rows[n].at(k, k_of<T>(0, 0, j))) : kNaNWords;
      }
    }
  }
}

// The thread block's, after the sums.
template <int kTiles, int kOutputs>
LLTM_CELL_INLINE Words* shared_weights(Gpu& m) {
  return reinterpret_cast<Words*>(m.shared() + shared_sums(kTiles, kOutputs));
}

// Two tiles in flight share the round trip of the first poll but need free registers.
template <int kUnitsK, int kSharedK, int kTiles, int kOutputs, bool kSplits>
constexpr bool kReadsAhead =
    kTiles > 1 && kSharedK == 0 && !kSplits && kUnitsK < (kOutputs == 1 ? 10 : 5);

// Independent mma chains, in which each mma waits for the previous. A single output is split into
// chains to fill the tensor cores, as far as registers allow.
template <int kUnitsK, int kOutputs>
constexpr int kChains = kOutputs > 1 || kUnitsK == 1 ? 1
                        : kUnitsK < 10               ? 4
                                                     : 2;

// A tile's sums in float32 arithmetic, if 3xTF32 made one that is not finite: the second part of
// infinity is NaN. Polls each word: relaxed reads of
// other lanes order nothing for this lane.
template <int kUnits, int kOutputs, typename T, typename Weights, typename Rows>
LLTM_CELL_INLINE void multiply_exactly(
    Gpu& m, const Weights& weights, const Rows& source, int tile, float (&d)[kOutputs][4]) {
  const int warp = m.thread() / kWarpLanes, lane = m.thread() % kWarpLanes;
  LLTM_UNROLL
  for (int row = 0; row < 2; ++row) {
    const auto state = source(tile, 2 * (lane % 4) + row);
    float sum[kOutputs][2] = {};
    LLTM_UNROLL_BY(1)
    for (int j = 0; j < 4 * kUnits; ++j) {
      States<T, 1> h;
      h.load(m, state, weights(0).k_size, warp, j % 4, j / 4);
      poll<1>(m, &h, &state, warp, j % 4, j / 4);
      LLTM_UNROLL
      for (int n = 0; n < kOutputs; ++n) {
        LLTM_UNROLL
        for (int odd = 0; odd < 2; ++odd) {
          const Words a = weights(n).read(2 * (lane / 4) + odd, k_of<T>(warp, j % 4, j / 4));
          LLTM_UNROLL
          for (int e = 0; e < 4; ++e) {
            const float factor = math::bit_cast<float>(h.x[0].w[e]);
            sum[n][odd] = __builtin_fmaf(math::bit_cast<float>(a.w[e]), factor, sum[n][odd]);
          }
        }
      }
    }
    LLTM_UNROLL
    for (int n = 0; n < kOutputs; ++n) {
      d[n][row] = sum[n][0];
      d[n][2 + row] = sum[n][1];
    }
  }
}

// `tiles` is the same for all threads. weights(n) has an output's, source(tile, row) is a row of
// the state.
template <
    int kTiles,
    bool kTf32,
    int kUnitsK,
    int kSharedK,
    int kOutputs,
    typename T,
    typename Weights,
    typename Rows>
LLTM_CELL_INLINE void multiply(
    Gpu& m,
    const WeightFragments<kUnitsK, kSharedK, kOutputs>& fragments,
    const Weights& weights,
    int tiles,
    const Rows& source,
    Sums* sums) {
  constexpr bool kSplits = kIsWord<T> && !kTf32;
  constexpr bool kAhead = kReadsAhead<kUnitsK, kSharedK, kTiles, kOutputs, kSplits>;
  constexpr int kInFlight = kAhead ? 2 : 1, kParts = kChains<kUnitsK, kOutputs>;
  constexpr int kChunk = shared_chunk(kOutputs);
  const int warp = m.thread() / kWarpLanes, lane = m.thread() % kWarpLanes;
  const int k_size = weights(0).k_size;
  const Words* const shared = shared_weights<kTiles, kOutputs>(m);
  States<T, kUnitsK> states[kInFlight];
  using Row = decltype(source(0, 0));
  Row rows[kInFlight];
  const auto load = [&](int tile) {
    Row& row = rows[tile % kInFlight];
    row = tile < kTiles && tile < tiles ? source(tile, lane / 4) : Row{};
    states[tile % kInFlight].load(m, row, k_size, warp, lane, 0);
  };
  LLTM_UNROLL
  for (int tile = 0; tile < kInFlight; ++tile) load(tile);
  LLTM_UNROLL_BY(kAhead ? kTiles : 1)  // constant indices of `states`
  for (int tile = 0; tile < kTiles; ++tile) {
    if (tile >= tiles) continue;
    States<T, kUnitsK>& now = states[tile % kInFlight];
    const Row& row = rows[tile % kInFlight];
    if (tile == 0) poll<kInFlight>(m, states, rows, warp, lane);
    if (tile >= kInFlight) poll<1>(m, &now, &row, warp, lane);
    [[maybe_unused]] States<T, kChunk> next;
    if constexpr (kSharedK > 0) next.load(m, row, k_size, warp, lane, kUnitsK);
    m.sync_warp();
    float d[kOutputs][kParts][4] = {};
    LLTM_UNROLL
    for (int j = 0; j < kUnitsK; ++j) {
      LLTM_UNROLL
      for (int part = 0; part < 2; ++part) {
        const auto& words = now.x[j].w;
        const Operand b = Gpu::operand<T, kTf32>(words[2 * part], words[2 * part + 1]);
        LLTM_UNROLL
        for (int n = 0; n < kOutputs; ++n) {
          m.mma<T, kTf32>(d[n][(2 * j + part) % kParts], fragments.a[n][j][part], b);
        }
      }
    }
    if constexpr (kSharedK > 0) {
      LLTM_UNROLL_BY(kIsWord<T> ? 2 : 1)  // two need no copies; 16 bits lack the registers
      for (int first = 0; first < kSharedK; first += kChunk) {
        poll<1>(m, &next, &row, warp, lane, kUnitsK + first);
        const States<T, kChunk> chunk = next;
        if (first + kChunk < kSharedK) {
          next.load(m, row, k_size, warp, lane, kUnitsK + first + kChunk);
        }
        m.sync_warp();
        LLTM_UNROLL
        for (int j = 0; j < kChunk; ++j) {
          LLTM_UNROLL
          for (int part = 0; part < 2; ++part) {
            const auto& words = chunk.x[j].w;
            const Operand b = Gpu::operand<T, kTf32>(words[2 * part], words[2 * part + 1]);
            LLTM_UNROLL
            for (int n = 0; n < kOutputs; ++n) {
              const Words a = shared[fragments.place(n, first + j, part, warp, lane)];
              m.mma<T, kTf32>(d[n][part % kParts], a, b);
            }
          }
        }
      }
    }
    if (tile + kInFlight < kTiles) load(tile + kInFlight);
    float sum[kOutputs][4];
    LLTM_UNROLL
    for (int n = 0; n < kOutputs; ++n) {
      LLTM_UNROLL
      for (int k = 0; k < 4; ++k) {
        sum[n][k] = d[n][0][k];
        LLTM_UNROLL
        for (int chain = 1; chain < kParts; ++chain) sum[n][k] += d[n][chain][k];
      }
    }
    if constexpr (kSplits) {
      float zero = 0;  // NaN if a sum is not finite
      LLTM_UNROLL
      for (int n = 0; n < kOutputs; ++n) {
        LLTM_UNROLL
        for (int k = 0; k < 4; ++k) zero = __builtin_fmaf(sum[n][k], 0.0F, zero);
      }
      if (m.any(zero != 0)) {
        multiply_exactly<kUnitsK + kSharedK, kOutputs, T>(m, weights, source, tile, sum);
      }
    }
    Sums* const mine = sums + (warp * kTiles + tile) * kOutputs * kTileSums;
    LLTM_UNROLL
    for (int n = 0; n < kOutputs; ++n) {
      const int row = 2 * (lane % 4), unit = 2 * (lane / 4);
      mine[n * kTileSums + place_of_sums(row, unit)] = {{sum[n][0], sum[n][2]}};
      mine[n * kTileSums + place_of_sums(row + 1, unit)] = {{sum[n][1], sum[n][3]}};
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

LLTM_CELL_INLINE int tiles_of(int rows, int first_row) {
  return (rows - first_row + kTileRows - 1) / kTileRows;
}

// Calls body(k) with k as a std::integral_constant. With unrolled loops, NVRTC uses up to twelve
// more registers in backward.
template <int kCount, typename Body>
LLTM_CELL_INLINE void for_each_index(const Body& body) {
  [&]<int... k>(std::integer_sequence<int, k...>) {
    (body(std::integral_constant<int, k>()), ...);
  }(std::make_integer_sequence<int, kCount>());
}

// Of a bias or parameter; zero if null.
template <typename T>
LLTM_CELL_INLINE float value_at(const Matrix<const T>& row, int column) {
  return row.data == nullptr ? 0 : static_cast<float>(row.data[column * row.col_stride]);
}

template <typename Cell, typename T>
LLTM_CELL_INLINE void load_bias(
    const PersistentForwardArgs<T>& a, int unit, float (&bias)[Cell::kCell.slots]) {
  for_each_index<Cell::kCell.slots>([&](auto slot) {
    constexpr int k = slot, of_x = Cell::kCell.x_blocks[k], of_h = Cell::kCell.h_blocks[k];
    if constexpr (Cell::kCell.x.contains(k)) bias[k] += value_at(a.bias_ih, of_x * a.hidden + unit);
    if constexpr (Cell::kCell.h.contains(k)) bias[k] += value_at(a.bias_hh, of_h * a.hidden + unit);
  });
}

// Of a unit.
template <typename Cell>
struct Parameters {
  static constexpr int kCount = Cell::kCell.parameters;
  float values[kCount > 0 ? kCount : 1] = {};

  template <typename Args>
  LLTM_CELL_INLINE void load_unit(const Args& a, int unit) {
    for_each_index<kCount>(
        [&](auto k) { values[k] = value_at(a.parameters, k * a.hidden + unit); });
  }
};

// c of a thread's rows (cell.h).
template <typename Cell, int kTiles>
struct UnitStates {
  static constexpr int kCount = Cell::kCell.state_columns();
  float c[kRowsOfThread<kTiles>][kCount] = {};

  // (B, K * H)
  template <typename T>
  LLTM_CELL_INLINE void load_rows(const T* from, int batch, int hidden, const ThreadPosition& p) {
    LLTM_UNROLL
    for (int n = 0; n < kRowsOfThread<kTiles>; ++n) {
      if (from == nullptr || !p.is_in(batch, n)) continue;
      LLTM_UNROLL
      for (int k = 0; k < kCount; ++k) {
        c[n][k] = static_cast<float>(from[offset_of(p.row(n) * kCount + k, hidden) + p.unit]);
      }
    }
  }
  template <typename T>
  LLTM_CELL_INLINE void store_rows(T* to, int batch, int hidden, const ThreadPosition& p) const {
    LLTM_UNROLL
    for (int n = 0; n < kRowsOfThread<kTiles>; ++n) {
      if (!p.is_in(batch, n)) continue;
      LLTM_UNROLL
      for (int k = 0; k < kCount; ++k) {
        to[offset_of(p.row(n) * kCount + k, hidden) + p.unit] = static_cast<T>(c[n][k]);
      }
    }
  }
};

// Of a thread's rows; 1 without a mask.
template <int kTiles, typename T>
LLTM_CELL_INLINE void load_mask(
    const T* mask,
    int batch,
    int hidden,
    const ThreadPosition& p,
    float (&to)[kRowsOfThread<kTiles>]) {
  LLTM_UNROLL
  for (int n = 0; n < kRowsOfThread<kTiles>; ++n) {
    const bool given = mask != nullptr && p.is_in(batch, n);
    to[n] = given ? static_cast<float>(mask[offset_of(p.row(n), hidden) + p.unit]) : 1.0F;
  }
}

// Before the step, h is zero and c initial.
LLTM_CELL_INLINE bool is_reset(const bool* reset, int row) {
  return reset != nullptr && reset[row];
}

template <typename Cell, int kTiles, typename T>
LLTM_CELL_INLINE void save_checkpoint(
    const PersistentForwardArgs<T>& a,
    const ThreadPosition& p,
    const StepCursor& step,
    const UnitStates<Cell, kTiles>& states) {
  if (a.checkpoints == nullptr) return;
  const int k = step.ascending ? step.time : a.last_time - step.time;
  if (k % a.checkpoint_steps != 0) return;
  const std::int64_t size = offset_of(a.batch * UnitStates<Cell, kTiles>::kCount, a.hidden);
  states.store_rows(a.checkpoints + k / a.checkpoint_steps * size, a.batch, a.hidden, p);
}

template <typename Cell, int kTiles, typename T>
LLTM_CELL_INLINE void finish_forward(
    const PersistentForwardArgs<T>& a,
    Gpu& m,
    const ThreadPosition& p,
    const StepCursor& step,
    const Sums* sums,
    const float (&bias)[Cell::kCell.slots],
    const Parameters<Cell>& parameters,
    const float (&mask)[kRowsOfThread<kTiles>],
    float (&in)[kRowsOfThread<kTiles>][ProgramSizes(Cell::kCell).forward_in],
    UnitStates<Cell, kTiles>& states,
    float (&h)[kRowsOfThread<kTiles>]) {
  constexpr ProgramSizes sizes(Cell::kCell);
  constexpr int kRows = kRowsOfThread<kTiles>, kSlots = Cell::kCell.slots;
  constexpr int kStates = UnitStates<Cell, kTiles>::kCount, kSaved = Cell::kCell.saved;
  float out[kRows][sizes.forward_out];
  std::uint32_t words[kRows];
  LLTM_UNROLL
  for (int n = 0; n < kRows; ++n) {
    for_each_index<kSlots>([&](auto slot) {
      constexpr int k = slot;
      in[n][k] += bias[k];
      if constexpr (Cell::kCell.h.contains(k)) {
        // A row after the first may be in a tile without rows, which has no sums.
        if (n > 0 && !p.is_in(step.rows, n)) return;
        add_sums<kTiles, kRecurrent<Cell>>(sums, p, n, k - Cell::kCell.h.begin, in[n][k]);
      }
    });
    LLTM_UNROLL
    for (int k = 0; k < kStates; ++k) in[n][kSlots + k] = states.c[n][k];
    LLTM_UNROLL
    for (int k = 0; k < Cell::kCell.parameters; ++k) {
      in[n][kSlots + kStates + k] = parameters.values[k];
    }
    Cell::forward(in[n], out[n]);
    words[n] = word_of<T>(m, static_cast<float>(static_cast<T>(out[n][0])) * mask[n]);
  }
  LLTM_UNROLL
  for (int n = 0; n < kRows; ++n) {
    if (!p.is_in(step.rows, n)) continue;
    const int row = step.offset + p.row(n);
    const std::int64_t at = offset_of(row, a.hidden) + p.unit;
    if (p.has_word<T>()) m.publish(a.operand + at, words[n]);
    if (a.operand != a.output) a.output[at] = narrow<T>(out[n][0]);
    h[n] = out[n][0];
    // Rounded as at a launch's end: results do not depend on the chunks.
    LLTM_UNROLL
    for (int k = 0; k < kStates; ++k) {
      const float next = out[n][Cell::kCell.reads_h ? k : 1 + k];  // h' comes first in both
      states.c[n][k] = static_cast<float>(static_cast<T>(next));
    }
    if (a.activations != nullptr) {
      T* const activations = a.activations + offset_of(row, kSaved * a.hidden) + p.unit;
      LLTM_UNROLL
      for (int k = 0; k < kSaved; ++k) {
        activations[k * a.hidden] = static_cast<T>(out[n][1 + Cell::kCell.states + k]);
      }
    }
  }
}

template <typename Cell, int kUnitsK, int kSharedK, int kTiles, bool kTf32, bool kHeads, typename T>
LLTM_CELL_INLINE void run_steps(const PersistentForwardArgs<T>& a, Gpu& m) {
  constexpr int kSlots = Cell::kCell.slots, kOutputs = kRecurrent<Cell>;
  constexpr int kRows = kRowsOfThread<kTiles>;
  const int hidden = a.hidden;
  const int first_row = first_row_of<kTiles>(m, a.first_row);
  const int warp = m.thread() / kWarpLanes, lane = m.thread() % kWarpLanes;
  m.begin();

  const int slice = m.slice() * kSliceUnits;
  const int units = kHeads ? a.head_units : a.hidden;
  const int head = kHeads ? slice / units * units : 0;  // its first unit
  const auto weights = [&](int n) -> WeightRows<T> {
    const int row = (kOutputs - 1) * head + n * units + slice;
    return {a.weights + offset_of(row, units), head + units - slice, units};
  };
  WeightFragments<kUnitsK, kSharedK, kOutputs> fragments;
  fragments.template load<T, kTf32>(m, weights, shared_weights<kTiles, kOutputs>(m), warp, lane);

  const ThreadPosition p = ThreadPosition::of<kTiles>(m, first_row, hidden);
  float bias[kSlots] = {}, mask[kRows], h[kRows] = {};
  UnitStates<Cell, kTiles> states;
  Parameters<Cell> parameters;
  load_mask<kTiles>(a.recurrent_mask, a.batch, hidden, p, mask);
  states.load_rows(a.c_before, a.batch, hidden, p);
  LLTM_UNROLL
  for (int n = 0; n < kRows; ++n) {
    if (p.is_in(a.batch, n))
      h[n] = static_cast<float>(a.h_before[offset_of(p.row(n), hidden) + p.unit]);
  }
  if (p.is_unit) {
    load_bias<Cell>(a, p.unit, bias);
    parameters.load_unit(a, p.unit);
  }

  int buffer = 0;
  for_each_step(a.steps, [&](const StepCursor& step) {
    save_checkpoint(a, p, step, states);
    if (step.rows <= first_row) return;
    float in[kRows][ProgramSizes(Cell::kCell).forward_in] = {};  // of the cell's program
    LLTM_UNROLL
    for (int n = 0; n < kRows; ++n) {
      if (!p.is_in(step.rows, n)) continue;
      if (is_reset(a.reset, step.offset + p.row(n))) {
        for_each_index<Cell::kCell.state_columns()>([&](auto index) {
          constexpr int k = index;
          states.c[n][k] = static_cast<float>(static_cast<T>(Cell::initial(k)));
        });
      }
      constexpr int kOfX = Cell::kCell.x.end;
      const int row = step.offset + p.row(n) - a.gates_offset;
      const float* const gates = a.gates + offset_of(row, kOfX * hidden) + p.unit;
      LLTM_UNROLL
      for (int k = 0; k < kOfX; ++k) in[n][k] = gates[k * hidden];
    }

    // The previous step's row, h_0 if the row is new, or zeros.
    const auto source = [&](int tile, int row_in_tile) -> StateRow<T> {
      const int row = first_row + tile * kTileRows + row_in_tile;
      if (row >= step.rows || is_reset(a.reset, step.offset + row)) return {};
      if (row >= step.previous_rows)
        return {a.h_0 + offset_of(row, hidden) + head, /*polled=*/false};
      const int previous = step.previous_offset + row;
      return {a.operand + offset_of(previous, hidden) + head, /*polled=*/true};
    };
    Sums* const sums = m.shared() + buffer * (shared_sums(kTiles, kOutputs) / 2);
    multiply<kTiles, kTf32, kUnitsK, kSharedK, kOutputs, T>(
        m, fragments, weights, tiles_of(step.rows, first_row), source, sums);
    m.sync_block();

    if (p.warp_is_in(step.rows)) {
      finish_forward<Cell, kTiles>(a, m, p, step, sums, bias, parameters, mask, in, states, h);
    }
    // One barrier per step is enough: a warp passes the next before it writes this buffer again.
    buffer = 1 - buffer;
  });

  states.store_rows(a.c, a.batch, hidden, p);
  LLTM_UNROLL
  for (int n = 0; n < kRows; ++n) {
    if (p.is_in(a.batch, n)) a.h[offset_of(p.row(n), hidden) + p.unit] = narrow<T>(h[n]);
  }
}

// A step's inputs that do not depend on other thread blocks. Not converted, which would wait for
// them before the first poll.
template <typename Cell, typename T>
struct StepInputs {
  static constexpr int kSaved = Cell::kCell.saved;
  T saved[kSaved > 0 ? kSaved : 1] = {}, grad_output = {};

  LLTM_CELL_INLINE void load_row(
      const PersistentBackwardArgs<T>& a, const StepCursor& step, int row, int unit) {
    const T* const activations =
        a.activations + offset_of(step.offset + row, kSaved * a.hidden) + unit;
    LLTM_UNROLL
    for (int k = 0; k < kSaved; ++k) saved[k] = activations[k * a.hidden];
    const StepMatrix<const T>& g = a.grad_output;
    if (g.data == nullptr) return;
    grad_output =
        g.data
            [offset_of(step.time, g.time_stride) + offset_of(step.offset, g.offset_stride) +
             offset_of(row, g.row_stride) + offset_of(unit, g.col_stride)];
  }
};

// dz, and the previous time step's gradients of the states, from dh.
template <typename Cell, int kTiles, typename T>
LLTM_CELL_INLINE void finish_backward(
    const PersistentBackwardArgs<T>& a,
    Gpu& m,
    const ThreadPosition& p,
    const StepCursor& step,
    const StepInputs<Cell, T> (&inputs)[kRowsOfThread<kTiles>],
    const Parameters<Cell>& parameters,
    const float (&dh)[kRowsOfThread<kTiles>],
    UnitStates<Cell, kTiles>& gradients) {
  constexpr ProgramSizes sizes(Cell::kCell);
  constexpr int kRows = kRowsOfThread<kTiles>, kGradients = Cell::kCell.grad_columns();
  constexpr int kSaved = Cell::kCell.saved, kParameters = Cell::kCell.parameters;
  constexpr int kStates = UnitStates<Cell, kTiles>::kCount, kOwn = Cell::kCell.reads_h ? 1 : 0;
  float before[kRows][kStates];
  std::uint32_t words[kRows][kGradients];
  LLTM_UNROLL
  for (int n = 0; n < kRows; ++n) {
    float in[sizes.backward_in], out[sizes.backward_out];
    LLTM_UNROLL
    for (int k = 0; k < kSaved; ++k) in[k] = static_cast<float>(inputs[n].saved[k]);
    LLTM_UNROLL
    for (int k = 0; k < kParameters; ++k) in[kSaved + k] = parameters.values[k];
    constexpr int kOfH = kSaved + kParameters;
    in[kOfH] = static_cast<float>(inputs[n].grad_output) + dh[n];
    if constexpr (kOwn != 0) in[kOfH] += gradients.c[n][0];
    LLTM_UNROLL
    for (int k = kOwn; k < kStates; ++k) in[kOfH + 1 - kOwn + k] = gradients.c[n][k];
    Cell::backward(in, out);
    LLTM_UNROLL
    for (int k = 0; k < kGradients; ++k) words[n][k] = word_of<T>(m, out[k]);
    LLTM_UNROLL
    for (int k = 0; k < kStates; ++k) before[n][k] = out[kGradients + k];
  }
  LLTM_UNROLL
  for (int n = 0; n < kRows; ++n) {
    if (!p.is_in(step.rows, n)) continue;
    const bool reset = is_reset(a.reset, step.offset + p.row(n));
    LLTM_UNROLL
    for (int k = 0; k < kStates; ++k) gradients.c[n][k] = reset ? 0 : before[n][k];
    if (!p.has_word<T>()) continue;
    T* const dz = a.dz + offset_of(step.offset + p.row(n), kGradients * a.hidden) + p.unit;
    LLTM_UNROLL
    for (int k = 0; k < kGradients; ++k) m.publish(dz + k * a.hidden, words[n][k]);
  }
}

template <typename Cell, int kUnitsK, int kSharedK, int kTiles, bool kTf32, bool kHeads, typename T>
LLTM_CELL_INLINE void run_steps(const PersistentBackwardArgs<T>& a, Gpu& m) {
  constexpr int kRows = kRowsOfThread<kTiles>;
  const int hidden = a.hidden;
  const int first_row = first_row_of<kTiles>(m, a.first_row);
  const int warp = m.thread() / kWarpLanes, lane = m.thread() % kWarpLanes;
  m.begin();

  const int slice = m.slice() * kSliceUnits;
  const int units = kHeads ? a.head_units : a.hidden;
  const int head = kHeads ? slice / units * units : 0;  // its first unit
  const auto weights = [&](int) -> WeightRows<T> {
    const int k_size = kRecurrent<Cell> * units;
    return {a.weights + offset_of(slice, k_size), a.hidden - slice, k_size};
  };
  WeightFragments<kUnitsK, kSharedK, 1> fragments;
  fragments.template load<T, kTf32>(m, weights, shared_weights<kTiles, 1>(m), warp, lane);

  const ThreadPosition p = ThreadPosition::of<kTiles>(m, first_row, hidden);
  float mask[kRows], dh[kRows] = {};
  UnitStates<Cell, kTiles> gradients;
  Parameters<Cell> parameters;
  load_mask<kTiles>(a.recurrent_mask, a.batch, hidden, p, mask);
  gradients.load_rows(a.dc_before, a.batch, hidden, p);
  LLTM_UNROLL
  for (int n = 0; n < kRows; ++n) {
    if (a.dh_before != nullptr && p.is_in(a.batch, n)) {
      dh[n] = a.dh_before[offset_of(p.row(n), hidden) + p.unit];
    }
  }
  if (p.is_unit) parameters.load_unit(a, p.unit);

  int buffer = 0;
  for_each_step(a.steps, [&](const StepCursor& step) {
    StepInputs<Cell, T> inputs[kRows];
    LLTM_UNROLL
    for (int n = 0; n < kRows; ++n) {
      if (p.is_in(step.rows, n)) {
        inputs[n].load_row(a, step, p.row(n), p.unit);
      }
    }

    // The gradient through h for the rows in the step that backward processed before.
    if (step.previous_rows > first_row) {
      using Row = std::conditional_t<kHeads, HeadRow<T>, StateRow<T>>;
      const auto source = [&](int tile, int row_in_tile) -> Row {
        const int row = first_row + tile * kTileRows + row_in_tile;
        const int previous = step.previous_offset + row;
        if (row >= step.previous_rows || is_reset(a.reset, previous)) return {};
        constexpr CellInfo kCell = Cell::kCell;
        const T* const dz =
            a.dz + offset_of(previous, kCell.grad_columns() * hidden) + kCell.h.begin * hidden;
        const StateRow<T> of_head = {dz + head, /*polled=*/true};
        if constexpr (kHeads) {
          return {of_head, static_cast<std::uint32_t>(0xFFFFFFFF / units + 1), hidden - units};
        } else {
          return of_head;
        }
      };
      Sums* const sums = m.shared() + buffer * (shared_sums(kTiles, 1) / 2);
      multiply<kTiles, kTf32, kUnitsK, kSharedK, 1, T>(
          m, fragments, weights, tiles_of(step.previous_rows, first_row), source, sums);
      m.sync_block();
      LLTM_UNROLL
      for (int n = 0; n < kRows; ++n) {
        if (!p.is_in(step.previous_rows, n)) continue;
        dh[n] = 0;
        add_sums<kTiles, 1>(sums, p, n, 0, dh[n]);
        dh[n] *= mask[n];
      }
      buffer = 1 - buffer;  // as in forward
    }

    if (p.warp_is_in(step.rows)) {
      finish_backward<Cell, kTiles>(a, m, p, step, inputs, parameters, dh, gradients);
    }
  });

  gradients.store_rows(a.dc, a.batch, hidden, p);
  LLTM_UNROLL
  for (int n = 0; n < kRows; ++n) {
    if (p.is_in(a.batch, n)) a.dh[offset_of(p.row(n), hidden) + p.unit] = dh[n];
  }
}

template <typename Args, typename Run>
__device__ void visit_direction(const Args& args, const Run& run) {
  run(args);
}
// Without an index, which needs registers.
template <typename Args, typename Run>
__device__ void visit_direction(const DirectionArgs<Args>& args, const Run& run) {
  if (blockIdx.z == 0) {
    run(args.of[0]);
  } else {
    run(args.of[1]);
  }
}

}  // namespace
}  // namespace lltm::cuda

// Of Definition, in this namespace.
#define LLTM_PERSISTENT_KERNEL(name, kUnitsK, kSharedK, kTiles, kTf32, kHeads)    \
  extern "C" __global__ void __launch_bounds__(kBlockThreads, 1)                  \
      name(const __grid_constant__ Args all) {                                    \
    visit_direction(all, [](const auto& args) {                                   \
      Gpu gpu{args.words};                                                        \
      run_steps<Definition, kUnitsK, kSharedK, kTiles, kTf32, kHeads>(args, gpu); \
    });                                                                           \
  }
