// The instructions that NVRTC generates for our kernels, by their names with all modifiers.
// Registers hold the bits of their type, extended by zeros.
#include "cpu/kernel/floats.h"
#include "ptx.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

namespace ptx {
namespace {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using s16 = std::int16_t;
using s32 = std::int32_t;
using s64 = std::int64_t;
using f32 = float;
using f64 = double;

// Clang has _Float16 only for some targets.
struct f16 {
  u16 bits;

  f16() = default;
  explicit f16(f32 x) : bits(lltm::cpu::narrow<lltm::cpu::Half>(x).bits) {}
  explicit operator f32() const { return lltm::cpu::widen(lltm::cpu::Half{bits}); }
  bool operator==(f16 x) const { return static_cast<f32>(*this) == static_cast<f32>(x); }
};
using Table = std::map<std::string, Opcode>;

template <int kBytes>
using Unsigned = std::conditional_t<
    kBytes == 1,
    u8,
    std::conditional_t<kBytes == 2, u16, std::conditional_t<kBytes == 4, u32, u64>>>;
template <typename T>
constexpr int kWidth = std::is_same_v<T, bool> ? 1 : 8 * static_cast<int>(sizeof(T));

template <typename T>
T from_bits(u64 bits) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(bits);
  } else {
    return std::bit_cast<T>(static_cast<Unsigned<sizeof(T)>>(bits));
  }
}
template <typename T>
u64 to_bits(T value) {
  if constexpr (std::is_same_v<T, bool>) {
    return value ? 1 : 0;
  } else {
    return std::bit_cast<Unsigned<sizeof(T)>>(value);
  }
}

template <typename Body>
void for_each_lane(Lanes lanes, const Body& body) {
  for (; lanes != 0; lanes &= lanes - 1) body(std::countr_zero(lanes));
}

// ---- Lane by lane ---------------------------------------------------------------

template <auto kFunction, typename R, typename... A, size_t... n>
void run_in_lanes(
    Warp& warp, const Instruction& i, Lanes lanes, R (*)(A...), std::index_sequence<n...>) {
  const u64* const from[] = {warp.row(i.registers[1 + n])...};
  u64* const to = warp.row(i.registers[0]);
  if (lanes != kAllLanes) {
    for_each_lane(
        lanes, [&](int l) { to[l] = to_bits<R>(kFunction(from_bits<A>(from[n][l])...)); });
    return;
  }
  u64 results[kWarpLanes];
  for (int l = 0; l < kWarpLanes; ++l) {
    results[l] = to_bits<R>(kFunction(from_bits<A>(from[n][l])...));
  }
  std::copy(results, results + kWarpLanes, to);
}

void add_opcode(Table& table, const Opcode& opcode) {
  table[opcode.name] = opcode;
}

// An instruction whose result depends on the operands in the same lane.
template <auto kFunction>
void add(Table& table, const std::string& name) {
  [&]<typename R, typename... A>(R (*)(A...)) {
    const Run run = [](Machine&, Warp& warp, const Instruction& i, Lanes lanes) {
      run_in_lanes<kFunction>(warp, i, lanes, +kFunction, std::make_index_sequence<sizeof...(A)>());
    };
    add_opcode(
        table, {name, run, std::vector<int>(1 + sizeof...(A), 1), {kWidth<R>, kWidth<A>...}});
  }(+kFunction);
}

// Shifts by the width or more give zeros, or copies of the sign.
template <typename T>
T shift_left(T a, u32 n) {
  return n < kWidth<T> ? a << n : T(0);
}
template <typename T>
T shift_right(T a, u32 n) {
  return a >> std::min<u32>(n, kWidth<T> - 1) >> (n >= kWidth<T> && std::is_unsigned_v<T> ? 1 : 0);
}

u32 permute(u32 a, u32 b, u32 selectors) {
  const u64 bytes = a | u64{b} << 32;
  u32 result = 0;
  for (int n = 0; n < 4; ++n) {
    const u32 selector = selectors >> 4 * n & 0xF;
    u32 byte = bytes >> 8 * (selector & 7) & 0xFF;
    if ((selector & 8) != 0) byte = (byte & 0x80) != 0 ? 0xFF : 0;  // the sign
    result |= byte << 8 * n;
  }
  return result;
}

// Subnormal operands and results are zero.
f32 flush(f32 x) {
  return std::abs(x) < 0x1p-126F ? std::copysign(0.0F, x) : x;
}

// To ten bits of the fraction, ties away from zero.
u32 to_tf32(f32 x) {
  return std::isnan(x) ? 0x7FFFFFFF : (std::bit_cast<u32>(x) + 0x1000) & 0xFFFFE000;
}

template <typename T>
void add_integer(Table& table, const std::string& type) {
  add<[](T a, T b) { return T(Unsigned<sizeof(T)>(a) + Unsigned<sizeof(T)>(b)); }>(
      table, "add." + type);
  add<[](T a, T b) { return T(Unsigned<sizeof(T)>(a) - Unsigned<sizeof(T)>(b)); }>(
      table, "sub." + type);
  add<[](T a, T b) { return T(u64(a) * u64(b)); }>(table, "mul.lo." + type);
  add<[](T a, T b, T c) { return T(u64(a) * u64(b) + u64(c)); }>(table, "mad.lo." + type);
  add<[](T a, T b) { return T(b == 0 ? -1 : a / b); }>(table, "div." + type);
  add<[](T a, T b) { return T(b == 0 ? a : a % b); }>(table, "rem." + type);
  add<shift_right<T>>(table, "shr." + type);
}

template <typename T>
void add_bits(Table& table, const std::string& type) {
  add<[](T a, T b) { return T(a & b); }>(table, "and." + type);
  add<[](T a, T b) { return T(a | b); }>(table, "or." + type);
  add<[](T a, T b) { return T(a ^ b); }>(table, "xor." + type);
  add<[](T a) {
    if constexpr (std::is_same_v<T, bool>) {
      return !a;
    } else {
      return T(~a);
    }
  }>(table, "not." + type);
}

template <typename T>
void add_move(Table& table, const std::string& type) {
  add<[](T a) { return a; }>(table, "mov." + type);
  add<[](T a, T b, bool first) { return first ? a : b; }>(table, "selp." + type);
}

// False if an operand is NaN.
template <typename T>
void add_comparisons(Table& table, const std::string& type) {
  add<[](T a, T b) { return a == b; }>(table, "setp.eq." + type);
  add<[](T a, T b) { return (a < b) || (a > b); }>(table, "setp.ne." + type);
  add<[](T a, T b) { return (a < b); }>(table, "setp.lt." + type);
  add<[](T a, T b) { return (a <= b); }>(table, "setp.le." + type);
  add<[](T a, T b) { return (a > b); }>(table, "setp.gt." + type);
  add<[](T a, T b) { return (a >= b); }>(table, "setp.ge." + type);
}

// The only NaN that float32 arithmetic and conversions produce.
template <typename T>
T canonical(T x) {
  if constexpr (sizeof(T) == 8) return x;
  constexpr auto kNaN = static_cast<Unsigned<sizeof(T)>>(sizeof(T) == 4 ? 0x7FFFFFFF : 0x7FFF);
  return x == x ? x : from_bits<T>(kNaN);
}

// Ignores a NaN; -0 is less than 0.
f32 largest(f32 a, f32 b) {
  if (a == b) return std::signbit(a) ? b : a;
  return canonical(std::fmax(a, b));
}

template <typename T>
void add_float(Table& table, const std::string& type) {
  for (const std::string rounding : {".", ".rn."}) {
    add<[](T a, T b) { return canonical(a + b); }>(table, "add" + rounding + type);
    add<[](T a, T b) { return canonical(a - b); }>(table, "sub" + rounding + type);
    add<[](T a, T b) { return canonical(a * b); }>(table, "mul" + rounding + type);
  }
  add<[](T a, T b) { return canonical(a / b); }>(table, "div.rn." + type);
  add<[](T a, T b, T c) { return canonical(std::fma(a, b, c)); }>(table, "fma.rn." + type);
  add<[](T a) { return canonical(std::sqrt(a)); }>(table, "sqrt.rn." + type);
  add<[](T a) { return -a; }>(table, "neg." + type);
  add<[](T a) { return std::abs(a); }>(table, "abs." + type);
  add_move<T>(table, type);
  add_comparisons<T>(table, type);
  add<[](T a, T b) { return !((a < b) || (a > b)); }>(table, "setp.equ." + type);
  add<[](T a, T b) { return a != b; }>(table, "setp.neu." + type);
  add<[](T a, T b) { return !(a >= b); }>(table, "setp.ltu." + type);
  add<[](T a, T b) { return !(a > b); }>(table, "setp.leu." + type);
  add<[](T a, T b) { return !(a <= b); }>(table, "setp.gtu." + type);
  add<[](T a, T b) { return !(a < b); }>(table, "setp.geu." + type);
  add<[](T a, T b) { return std::isnan(a) || std::isnan(b); }>(table, "setp.nan." + type);
  add<[](T a, T b) { return !std::isnan(a) && !std::isnan(b); }>(table, "setp.num." + type);
}

// A register as two of half its width.
template <typename T>
void unpack(Machine&, Warp& warp, const Instruction& i, Lanes lanes) {
  for_each_lane(lanes, [&](int lane) {
    const u64 bits = warp.row(i.registers[2])[lane];
    warp.row(i.registers[0])[lane] = static_cast<T>(bits);
    warp.row(i.registers[1])[lane] = bits >> kWidth<T>;
  });
}

template <typename T>
void add_pack(Table& table, const std::string& type) {
  const int width = kWidth<T>;
  const std::string pack = "mov." + type + " pack", unpacked = "mov." + type + " unpack";
  add<[](T a, T b) { return Unsigned<2 * sizeof(T)>(a | u64(b) << kWidth<T>); }>(table, pack);
  table[pack].counts = {1, 2};
  table[pack].widths = {2 * width, width};
  add_opcode(table, {unpacked, unpack<T>, {2, 1}, {width, 2 * width}});
}

// ---- Memory -----------------------------------------------------------------------

enum class Space { kParameter, kShared, kGlobal };

template <typename T, int kCount, Space kSpace, Kind kKind>
void access(Machine& machine, Warp& warp, const Instruction& i, Lanes lanes) {
  constexpr int kBytes = kCount * static_cast<int>(sizeof(T));
  constexpr bool kLoads = is_load(kKind);
  const u64* const addresses = warp.row(i.registers[kLoads ? kCount : 0]);
  const int first = kLoads ? 0 : 1;  // register of a value
  for_each_lane(lanes, [&](int lane) {
    const u64 address = addresses[lane] + static_cast<u64>(i.offset);
    if (address % kBytes != 0) throw Error("an unaligned address");
    if constexpr (kKind == Kind::kPublish) {
      static_assert(sizeof(T) == 4 && kCount == 1 && kSpace == Space::kGlobal);
      machine.publish(warp, lane, address, static_cast<u32>(warp.row(i.registers[1])[lane]));
    } else {
      char* data = nullptr;
      if (kSpace == Space::kParameter) data = machine.parameter(address, kBytes);
      if (kSpace == Space::kShared) data = machine.shared(warp, lane, address, kBytes, kKind);
      if (kSpace == Space::kGlobal && kKind != Kind::kStrongLoad) {
        data = machine.global(warp, lane, address, kBytes, kKind);
      }
      for (int n = 0; n < kCount; ++n) {
        u64& value = warp.row(i.registers[first + n])[lane];
        T memory;
        if constexpr (kLoads) {
          if constexpr (kKind == Kind::kStrongLoad) {
            memory = machine.load_relaxed(warp, lane, address + n * sizeof(T));
          } else {
            std::memcpy(&memory, data + n * sizeof(T), sizeof(T));
          }
          // Extended to a wider register.
          value = i.width == 64 && std::is_same_v<T, s32>
                      ? static_cast<u64>(static_cast<s64>(memory))
                      : to_bits(memory);
        } else {
          memory = from_bits<T>(value);
          std::memcpy(data + n * sizeof(T), &memory, sizeof(T));
        }
      }
    }
  });
}

template <typename T, Space kSpace, Kind kKind>
void add_access(Table& table, const std::string& prefix, const std::string& type) {
  const auto add_vector = [&]<int kCount>(std::integral_constant<int, kCount>) {
    constexpr bool kLoads = is_load(kKind);
    constexpr bool kIsScalar = kKind >= Kind::kPublish;
    constexpr int kMost = kSpace == Space::kParameter ? 8 : 16;  // alignment
    if constexpr (kCount * sizeof(T) <= kMost && !(kIsScalar && kCount > 1)) {
      const std::string vector = kCount == 1 ? "." : ".v" + std::to_string(kCount) + ".";
      const std::string name = (kLoads ? "ld." : "st.") + prefix + vector + type;
      // Registers may be wider than the memory.
      const int width = std::is_integral_v<T> ? 0 : kWidth<T>;
      add_opcode(
          table,
          {name,
           access<T, kCount, kSpace, kKind>,
           kLoads ? std::vector<int>{kCount, 1} : std::vector<int>{1, kCount},
           kLoads ? std::vector<int>{width, 64} : std::vector<int>{64, width}});
    }
  };
  add_vector(std::integral_constant<int, 1>());
  add_vector(std::integral_constant<int, 2>());
  add_vector(std::integral_constant<int, 4>());
}

template <typename T>
void add_accesses(Table& table, const std::string& type) {
  add_access<T, Space::kParameter, Kind::kLoad>(table, "param", type);
  add_access<T, Space::kShared, Kind::kLoad>(table, "shared", type);
  add_access<T, Space::kShared, Kind::kStore>(table, "shared", type);
  add_access<T, Space::kGlobal, Kind::kLoad>(table, "global", type);
  add_access<T, Space::kGlobal, Kind::kStore>(table, "global", type);
}

// Relaxed. Returns the value before.
void atomic_add(Machine& machine, Warp& warp, const Instruction& i, Lanes lanes) {
  for_each_lane(lanes, [&](int lane) {
    const u64 address = warp.row(i.registers[1])[lane] + static_cast<u64>(i.offset);
    if (address % sizeof(u32) != 0) throw Error("an unaligned address");
    char* const data = machine.global(warp, lane, address, sizeof(u32), Kind::kStrongStore);
    u32 value;
    std::memcpy(&value, data, sizeof(value));
    warp.row(i.registers[0])[lane] = value;
    value += static_cast<u32>(warp.row(i.registers[2])[lane]);
    std::memcpy(data, &value, sizeof(value));
  });
}

// ---- Warps ------------------------------------------------------------------------

void require_full_mask(Warp& warp, int number) {
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    if (static_cast<u32>(warp.row(number)[lane]) != kAllLanes) throw Error("unknown lane mask");
  }
}

// shfl.sync.bfly d|p, a, lane mask, clamp and segments, membermask
void shuffle(Machine&, Warp& warp, const Instruction& i, Lanes) {
  require_full_mask(warp, i.registers[5]);
  u64 values[kWarpLanes];
  std::copy_n(warp.row(i.registers[2]), kWarpLanes, values);
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    if (warp.row(i.registers[4])[lane] != 0x1F) throw Error("unknown segments");
    const u64 from = lane ^ warp.row(i.registers[3])[lane];
    if (from >= kWarpLanes) throw Error("a shuffle from outside of the warp");
    warp.row(i.registers[0])[lane] = values[from];
    warp.row(i.registers[1])[lane] = 1;
  }
}

void vote_any(Machine&, Warp& warp, const Instruction& i, Lanes) {
  require_full_mask(warp, i.registers[2]);
  const u64* const votes = warp.row(i.registers[1]);
  const bool any = std::any_of(votes, votes + kWarpLanes, [](u64 vote) { return vote != 0; });
  std::fill_n(warp.row(i.registers[0]), kWarpLanes, any ? 1 : 0);
}

void synchronize_lanes(Machine&, Warp& warp, const Instruction& i, Lanes) {
  require_full_mask(warp, i.registers[0]);
}

struct Bf16 {
  u16 bits;
};
struct Tf32 {
  u32 bits;
};
f64 element(f16 x) {
  return static_cast<f32>(x);
}
f64 element(Bf16 x) {
  return std::bit_cast<f32>(u32{x.bits} << 16);
}
f64 element(Tf32 x) {
  return std::bit_cast<f32>(x.bits & 0xFFFFE000);
}

// D (16, 8) = A (16, kK) B (kK, 8) + C in float32. T: elements of A and B, of which a register has
// one or two adjacent in K.
template <typename T, int kK>
void mma(Machine&, Warp& warp, const Instruction& i, Lanes) {
  constexpr int kPacked = 4 / static_cast<int>(sizeof(T));
  constexpr int kA = 16 * kK / (kWarpLanes * kPacked), kB = kA / 2;  // registers
  constexpr int kFirstA = 4, kFirstB = kFirstA + kA, kFirstC = kFirstB + kB;
  f64 a[16][kK], b[kK][8];
  const auto packed = [&](int number, int lane, int e) {
    const u64 bits = warp.row(i.registers[number])[lane];
    return element(from_bits<T>(bits >> (8 * sizeof(T) * e)));
  };
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    const int group = lane / 4, within = lane % 4;
    for (int e = 0; e < kPacked; ++e) {
      for (int n = 0; n < kA; ++n) {
        a[group + 8 * (n % 2)][kPacked * (within + 4 * (n / 2)) + e] = packed(kFirstA + n, lane, e);
      }
      for (int n = 0; n < kB; ++n) {
        b[kPacked * (within + 4 * n) + e][group] = packed(kFirstB + n, lane, e);
      }
    }
  }
  f32 d[4][kWarpLanes];
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    for (int n = 0; n < 4; ++n) {
      const int row = lane / 4 + 8 * (n / 2), col = 2 * (lane % 4) + n % 2;
      f64 sum = from_bits<f32>(warp.row(i.registers[kFirstC + n])[lane]);
      for (int k = 0; k < kK; ++k) sum += a[row][k] * b[k][col];
      d[n][lane] = static_cast<f32>(sum);
    }
  }
  for (int n = 0; n < 4; ++n) {
    for (int lane = 0; lane < kWarpLanes; ++lane) {
      warp.row(i.registers[n])[lane] = to_bits(d[n][lane]);
    }
  }
}

template <typename T, int kK>
void add_mma(Table& table, const std::string& type) {
  constexpr int kA = 16 * kK * static_cast<int>(sizeof(T)) / (4 * kWarpLanes);
  const std::string name =
      "mma.sync.aligned.m16n8k" + std::to_string(kK) + ".row.col.f32." + type + "." + type + ".f32";
  add_opcode(table, {name, mma<T, kK>, {4, kA, kA / 2, 4}, {32, 32, 32, 32}, Control::kAligned});
}

// ---- All ----------------------------------------------------------------------------

Table make_table() {
  Table table;
  add_integer<s32>(table, "s32");
  add_integer<s64>(table, "s64");
  add_integer<u32>(table, "u32");
  add_integer<u64>(table, "u64");
  add<[](s32 a, s32 b) { return s64{a} * b; }>(table, "mul.wide.s32");
  add<[](u32 a, u32 b) { return u64{a} * b; }>(table, "mul.wide.u32");
  add<shift_left<u32>>(table, "shl.b32");
  add<shift_left<u64>>(table, "shl.b64");
  add<permute>(table, "prmt.b32");
  add<[](u32 a, u32 b) { return std::max(a, b); }>(table, "max.u32");

  add_bits<bool>(table, "pred");
  add_bits<u16>(table, "b16");
  add_bits<u32>(table, "b32");
  add_bits<u64>(table, "b64");
  add<[](bool a) { return a; }>(table, "mov.pred");
  for (const std::string kind : {"b", "u", "s"}) {
    add_move<u16>(table, kind + "16");
    add_move<u32>(table, kind + "32");
    add_move<u64>(table, kind + "64");
  }

  add_pack<u16>(table, "b32");
  add_pack<u32>(table, "b64");

  add_comparisons<s16>(table, "s16");
  add_comparisons<u16>(table, "u16");
  add_comparisons<s32>(table, "s32");
  add_comparisons<u32>(table, "u32");
  add_comparisons<s64>(table, "s64");
  add_comparisons<u64>(table, "u64");

  add_float<f32>(table, "f32");
  add_float<f64>(table, "f64");
  add<[](f32 a) { return canonical(flush(1 / flush(a))); }>(table, "rcp.approx.ftz.f32");
  add<[](f32 a) { return canonical(1 / a); }>(table, "rcp.rn.f32");
  add<largest>(table, "max.f32");

  add<[](f16 a) { return canonical(static_cast<f32>(a)); }>(table, "cvt.f32.f16");
  add<[](f32 a) { return canonical(static_cast<f16>(a)); }>(table, "cvt.rn.f16.f32");
  add<to_tf32>(table, "cvt.rna.tf32.f32");
  add<[](s32 a) { return s64{a}; }>(table, "cvt.s64.s32");
  add<[](u32 a) { return u64{a}; }>(table, "cvt.u64.u32");
  add<[](u64 a) { return static_cast<u32>(a); }>(table, "cvt.u32.u64");
  add<[](u16 a) { return u32{a}; }>(table, "cvt.u32.u16");
  add<[](u32 a) { return static_cast<u16>(a); }>(table, "cvt.u16.u32");
  add<[](u64 a) { return a; }>(table, "cvta.to.global.u64");

  add_accesses<u8>(table, "u8");
  add_accesses<u16>(table, "u16");
  add_accesses<u32>(table, "u32");
  add_access<s32, Space::kParameter, Kind::kLoad>(table, "param", "s32");
  add_accesses<u64>(table, "u64");
  add_accesses<f32>(table, "f32");
  add_accesses<f64>(table, "f64");
  for (const std::string type : {"u32", "b32"}) {
    add_access<u32, Space::kGlobal, Kind::kStrongLoad>(table, "relaxed.gpu.global", type);
    add_access<u32, Space::kGlobal, Kind::kPublish>(table, "relaxed.gpu.global", type);
    add_access<u32, Space::kGlobal, Kind::kStrongStore>(table, "relaxed.sys.global", type);
  }

  add_opcode(table, {"atom.global.add.u32", atomic_add, {1, 1, 1}, {32, 64, 32}});
  add_opcode(
      table, {"shfl.sync.bfly.b32", shuffle, {2, 1, 1, 1, 1}, {0, 32, 32, 32, 32}, Control::kSync});
  add_opcode(table, {"vote.sync.any.pred", vote_any, {1, 1, 1}, {1, 1, 32}, Control::kSync});
  add_opcode(table, {"bar.warp.sync", synchronize_lanes, {1}, {32}, Control::kSync});
  add_opcode(table, {"bar.sync", nullptr, {1}, {32}, Control::kBarrier});
  add_opcode(table, {"bra", nullptr, {}, {}, Control::kBranch});
  add_opcode(table, {"bra.uni", nullptr, {}, {}, Control::kBranch});
  add_opcode(table, {"ret", nullptr, {}, {}, Control::kExit});
  add_mma<Bf16, 16>(table, "bf16");
  add_mma<f16, 16>(table, "f16");
  add_mma<f16, 8>(table, "f16");
  add_mma<Tf32, 8>(table, "tf32");
  return table;
}

const Table& all() {
  static const Table table = make_table();
  return table;
}

}  // namespace

const Opcode* find_opcode(const std::string& name) {
  const auto found = all().find(name);
  return found == all().end() ? nullptr : &found->second;
}

std::vector<std::string> opcode_names() {
  std::vector<std::string> names;
  for (const auto& [name, opcode] : all()) names.push_back(name);
  return names;
}

}  // namespace ptx
