// The interpreter of PTX: each instruction against the PTX ISA's definition, and each error.
#include "cpu/kernel/floats.h"
#include "ptx.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>

namespace ptx {
namespace {

using u32 = std::uint32_t;
using u64 = std::uint64_t;

constexpr std::size_t kWords = 256;  // per test

u64 bits(float x) {
  return std::bit_cast<u32>(x);
}
u64 bits(double x) {
  return std::bit_cast<u64>(x);
}
const u64 kNaN32 = 0x7FFFFFFF, kNaN64 = bits(std::numeric_limits<double>::quiet_NaN());
const u64 kInfinity = bits(std::numeric_limits<float>::infinity());

// `data` is %rd0, with a word for each lane at %rd1. %r0 is the thread.
class Program {
 public:
  Program() : data(kWords) { memory_.add(data.data(), data.size() * sizeof(u64)); }

  void run(const std::string& code, Launch launch = {{1, 1, 1}, kWarpLanes}) {
    const Kernel kernel = parse(
        ".shared .align 16 .b8 buffer[];\n.entry test(\n\t.param .u64 test_param_0,\n\t.param "
        ".align 16 .b8 test_param_1[48]\n)\n{\n"
        "\t.reg .pred %p<9>;\n\t.reg .b16 %rs<9>;\n\t.reg .b32 %r<9>;\n\t.reg .b64 %rd<9>;\n"
        "ld.param.u64 %rd0, [test_param_0];\nmov.u32 %r0, %tid.x;\nmul.wide.u32 %rd1, %r0, 8;\n"
        "add.s64 %rd1, %rd0, %rd1;\n" +
        code + "\nret;\n}\n");
    const void* const first = data.data();
    launch.parameters = {&first, data.data()};
    launch.shared_bytes = 64;
    Options limited = options;
    limited.most_instructions = 100'000;
    ptx::run(kernel, launch, memory_, limited);
  }

  std::vector<u64> data;
  Options options;

 private:
  Memory memory_;
};

void expect_error(const std::string& code, const std::string& error, const Launch& launch) {
  try {
    Program().run(code, launch);
    ADD_FAILURE() << "no error: " << code;
  } catch (const Error& thrown) {
    EXPECT_NE(std::string(thrown.what()).find(error), std::string::npos) << thrown.what();
  }
}
void expect_error(const std::string& code, const std::string& error) {
  expect_error(code, error, {{1, 1, 1}, kWarpLanes});
}

// Also the names of the tests of other instructions.
std::set<std::string> tested = {"ret", "bra.uni"};

const char* register_of(int width) {
  return width == 1 ? "%p" : width == 16 ? "%rs" : width == 64 ? "%rd" : "%r";
}

// Applied to constants.
struct Case {
  std::string name;
  std::vector<u64> in;
  u64 out;
};

u64 result_of(const Case& test) {
  const Opcode* const opcode = find_opcode(test.name);
  if (opcode == nullptr) throw Error("unknown " + test.name);
  tested.insert(test.name);
  const std::string name = test.name.substr(0, test.name.find(' '));
  const std::string result = register_of(opcode->widths[0]) + std::string("3");
  std::string operands;
  for (const u64 value : test.in) operands += ", " + std::to_string(value);
  if (name != test.name) operands = ", {" + operands.substr(2) + "}";
  std::string store = "st.global.u64 [%rd1], " + result + ";";
  if (opcode->widths[0] == 1) store = "selp.b64 %rd3, 1, 0, %p3;\nst.global.u64 [%rd1], %rd3;";
  Program program;
  program.run(name + " " + result + operands + ";\n" + store);
  for (int lane = 1; lane < kWarpLanes; ++lane) EXPECT_EQ(program.data[lane], program.data[0]);
  return program.data[0];
}

TEST(PtxInstructions, OfConstants) {
  const u64 kMinus1 = 0xFFFFFFFF, kMinus1Of64 = ~u64{0};
  const u64 kLow = 0x80000000, kLowOf64 = u64{1} << 63;
  const std::vector<Case> cases = {
      {"add.s32", {0x7FFFFFFF, 1}, kLow},
      {"add.u32", {kMinus1, 2}, 1},
      {"add.s64", {kMinus1Of64, 2}, 1},
      {"add.u64", {kMinus1, 2}, 0x100000001},
      {"sub.s32", {1, 2}, kMinus1},
      {"sub.u32", {1, 2}, kMinus1},
      {"sub.s64", {1, 2}, kMinus1Of64},
      {"sub.u64", {1, 2}, kMinus1Of64},
      {"mul.lo.s32", {kMinus1, 3}, 0xFFFFFFFD},
      {"mul.lo.u32", {0x10001, 0x10001}, 0x20001},
      {"mul.lo.s64", {kMinus1Of64, 3}, kMinus1Of64 - 2},
      {"mul.lo.u64", {u64{1} << 32 | 1, u64{1} << 32 | 1}, u64{1} << 33 | 1},
      {"mul.wide.s32", {kMinus1, 3}, kMinus1Of64 - 2},
      {"mul.wide.u32", {kMinus1, 3}, 0x2FFFFFFFD},
      {"mad.lo.s32", {kMinus1, 3, 5}, 2},
      {"mad.lo.u32", {0x10000, 0x10000, 5}, 5},
      {"mad.lo.s64", {kMinus1Of64, 3, 5}, 2},
      {"mad.lo.u64", {3, 4, 5}, 17},
      {"div.s32", {static_cast<u32>(-7), 2}, static_cast<u32>(-3)},
      {"div.u32", {static_cast<u32>(-8), 2}, 0x7FFFFFFC},
      {"div.s64", {static_cast<u64>(-7), 2}, static_cast<u64>(-3)},
      {"div.u64", {static_cast<u64>(-8), 2}, 0x7FFFFFFFFFFFFFFC},
      {"rem.s32", {static_cast<u32>(-7), 4}, static_cast<u32>(-3)},
      {"rem.u32", {kMinus1, 10}, 5},
      {"rem.s64", {static_cast<u64>(-7), 4}, static_cast<u64>(-3)},
      {"rem.u64", {kMinus1Of64, 10}, 5},
      {"shl.b32", {3, 31}, kLow},
      {"shl.b32", {3, 32}, 0},
      {"shl.b64", {3, 63}, kLowOf64},
      {"shl.b64", {3, 64}, 0},
      {"shr.s32", {kLow, 4}, 0xF8000000},
      {"shr.s32", {kLow, 99}, kMinus1},
      {"shr.u32", {kLow, 4}, 0x08000000},
      {"shr.u32", {kLow, 32}, 0},
      {"shr.s64", {kLowOf64, 63}, kMinus1Of64},
      {"shr.u64", {kLowOf64, 63}, 1},
      {"shr.u64", {kLowOf64, 64}, 0},
      {"prmt.b32", {0x33221100, 0x77665544, 0x1054}, 0x11005544},
      {"prmt.b32", {0x332211F0, 0x77665544, 0x8F32}, 0xFF003322},
      {"max.u32", {kMinus1, 1}, kMinus1},
      {"and.pred", {1, 0}, 0},
      {"and.b16", {0xFF0F, 0x3333}, 0x3303},
      {"and.b32", {0xFF00FF00, 0x12345678}, 0x12005600},
      {"and.b64", {kMinus1Of64 << 32, kMinus1Of64 >> 8}, 0x00FFFFFF00000000},
      {"or.pred", {1, 0}, 1},
      {"or.b16", {0xFF0F, 0x3333}, 0xFF3F},
      {"or.b32", {0xFF00FF00, 0x12345678}, 0xFF34FF78},
      {"or.b64", {kLowOf64, 1}, kLowOf64 + 1},
      {"xor.pred", {1, 1}, 0},
      {"xor.b16", {0xFF0F, 0x3333}, 0xCC3C},
      {"xor.b32", {0xFF00FF00, 0x12345678}, 0xED34A978},
      {"xor.b64", {kMinus1Of64, 1}, kMinus1Of64 - 1},
      {"not.pred", {1}, 0},
      {"not.b16", {0xFF0F}, 0x00F0},
      {"not.b32", {1}, kMinus1 - 1},
      {"not.b64", {1}, kMinus1Of64 - 1},
      {"mov.pred", {1}, 1},
      {"mov.b32 pack", {0x1234, 0x5678}, 0x56781234},
      {"mov.b64 pack", {0x12345678, 0x9ABCDEF0}, 0x9ABCDEF012345678},
      {"cvt.f32.f16", {0x3C01}, bits(1 + 0x1p-10F)},
      {"cvt.f32.f16", {0x8001}, bits(-0x1p-24F)},
      {"cvt.f32.f16", {0xFE00}, kNaN32},
      {"cvt.rn.f16.f32", {bits(1 + 0x1p-11F)}, 0x3C00},  // ties to even
      {"cvt.rn.f16.f32", {bits(1 + 0x3p-11F)}, 0x3C02},
      {"cvt.rn.f16.f32", {bits(65520.0F)}, 0x7C00},
      {"cvt.rn.f16.f32", {kNaN32}, 0x7FFF},
      {"cvt.rna.tf32.f32", {bits(1 + 0x1p-11F)}, bits(1 + 0x1p-10F)},  // ties away from zero
      {"cvt.rna.tf32.f32", {bits(-1 - 0x1p-12F)}, bits(-1.0F)},
      {"cvt.s64.s32", {kMinus1}, kMinus1Of64},
      {"cvt.u64.u32", {kMinus1}, kMinus1},
      {"cvt.u32.u64", {0x123456789}, 0x23456789},
      {"cvt.u32.u16", {0xFFFF}, 0xFFFF},
      {"cvt.u16.u32", {0x12345678}, 0x5678},
      {"cvta.to.global.u64", {77}, 77},
      {"rcp.approx.ftz.f32", {bits(4.0F)}, bits(0.25F)},
      {"rcp.approx.ftz.f32", {bits(-0x1p-127F)}, bits(-std::numeric_limits<float>::infinity())},
      {"rcp.approx.ftz.f32", {bits(0x1p127F)}, 0},
      {"rcp.rn.f32", {bits(0x3p-129F)}, bits(1 / 0x3p-129F)},
      {"max.f32", {bits(1.0F), bits(-2.0F)}, bits(1.0F)},
      {"max.f32", {kNaN32, bits(-2.0F)}, bits(-2.0F)},
      {"max.f32", {bits(-0.0F), bits(0.0F)}, bits(0.0F)},
      {"max.f32", {bits(0.0F), bits(-0.0F)}, bits(0.0F)},
      {"fma.rn.f32", {bits(1 + 0x1p-23F), bits(1 - 0x1p-23F), bits(-1.0F)}, bits(-0x1p-46F)},
      {"fma.rn.f64", {bits(1 + 0x1p-52), bits(1 - 0x1p-52), bits(-1.0)}, bits(-0x1p-104)},
      {"fma.rn.f32", {kInfinity, 0, 0}, kNaN32}};
  for (const Case& test : cases) EXPECT_EQ(result_of(test), test.out) << test.name;

  for (const std::string type : {"b16", "u16", "s16", "b32", "u32", "s32", "b64", "u64", "s64"}) {
    EXPECT_EQ(result_of({"mov." + type, {0x1234}, 0}), 0x1234) << type;
    EXPECT_EQ(result_of({"selp." + type, {1, 2, 1}, 0}), 1) << type;
    EXPECT_EQ(result_of({"selp." + type, {1, 2, 0}, 0}), 2) << type;
  }
}

template <typename T>
void check_floats(const std::string& type) {
  const T a = T(1) / 3, b = T(2) / 7, tiny = std::numeric_limits<T>::denorm_min();
  const auto of = [&](const std::string& name, T x, T y) {
    return result_of({name + "." + type, {bits(x), bits(y)}, 0});
  };
  for (const std::string rounding : {"", ".rn"}) {
    EXPECT_EQ(of("add" + rounding, a, b), bits(a + b));
    EXPECT_EQ(of("sub" + rounding, a, b), bits(a - b));
    EXPECT_EQ(of("mul" + rounding, a, b), bits(a * b));
    EXPECT_EQ(of("mul" + rounding, tiny, T(3)), bits(3 * tiny));
  }
  EXPECT_EQ(of("div.rn", a, b), bits(a / b));
  const auto of_one = [&](const std::string& name, T x) {
    return result_of({name + "." + type, {bits(x)}, 0});
  };
  EXPECT_EQ(of_one("neg", a), bits(-a));
  EXPECT_EQ(of_one("abs", -a), bits(a));
  EXPECT_EQ(of_one("sqrt.rn", a), bits(std::sqrt(a)));
  EXPECT_EQ(of_one("mov", a), bits(a));
  EXPECT_EQ(result_of({"selp." + type, {bits(a), bits(b), 0}, 0}), bits(b));
}

TEST(PtxInstructions, Floats) {
  check_floats<float>("f32");
  check_floats<double>("f64");
  EXPECT_EQ(result_of({"sub.f32", {kInfinity, kInfinity}, 0}), kNaN32);
}

TEST(PtxInstructions, Comparisons) {
  struct Comparison {
    std::string name;
    bool less, equal, greater, unordered;
  };
  const std::vector<Comparison> comparisons = {
      {"eq", 0, 1, 0, 0},
      {"ne", 1, 0, 1, 0},
      {"lt", 1, 0, 0, 0},
      {"le", 1, 1, 0, 0},
      {"gt", 0, 0, 1, 0},
      {"ge", 0, 1, 1, 0},
      {"equ", 0, 1, 0, 1},
      {"neu", 1, 0, 1, 1},
      {"ltu", 1, 0, 0, 1},
      {"leu", 1, 1, 0, 1},
      {"gtu", 0, 0, 1, 1},
      {"geu", 0, 1, 1, 1},
      {"num", 1, 1, 1, 0},
      {"nan", 0, 0, 0, 1}};
  // For each type, two numbers in ascending order. -1 is the largest unsigned number.
  const std::vector<Case> types = {
      {"s16", {0xFFFF, 1}, 0},
      {"u16", {1, 0xFFFF}, 0},
      {"s32", {0xFFFFFFFF, 1}, 0},
      {"u32", {1, 0xFFFFFFFF}, 0},
      {"s64", {~u64{0}, 1}, 0},
      {"u64", {1, ~u64{0}}, 0},
      {"f32", {bits(-2.0F), bits(-1.0F)}, kNaN32},
      {"f64", {bits(-2.0), bits(-1.0)}, kNaN64}};
  for (const Case& type : types) {
    for (const Comparison& comparison : comparisons) {
      const bool of_floats = comparison.name.size() == 3;
      if (of_floats && type.out == 0) continue;
      const auto result = [&](u64 a, u64 b) {
        return result_of({"setp." + comparison.name + "." + type.name, {a, b}, 0}) != 0;
      };
      const u64 low = type.in[0], high = type.in[1];
      EXPECT_EQ(result(low, high), comparison.less) << comparison.name << type.name;
      EXPECT_EQ(result(low, low), comparison.equal) << comparison.name << type.name;
      EXPECT_EQ(result(high, low), comparison.greater) << comparison.name << type.name;
      if (type.out == 0) continue;
      EXPECT_EQ(result(type.out, low), comparison.unordered) << comparison.name << type.name;
      EXPECT_EQ(result(low, type.out), comparison.unordered) << comparison.name << type.name;
    }
  }
}

TEST(PtxInstructions, Unpack) {
  Program program;
  program.run(
      "mov.b32 {%rs1, %rs2}, 0x12345678;\nmov.b64 {%r1, %r2}, 0x123456789ABCDEF0;\n"
      "@!%p1 bra $end;\n$end:\nsetp.ne.s32 %p1, %r0, 0;\n@%p1 ret;\n"
      "st.global.u64 [%rd0], %rs1;\nst.global.u64 [%rd0+8], %rs2;\n"
      "st.global.u64 [%rd0+16], %r1;\nst.global.u64 [%rd0+24], %r2;");
  program.data.resize(4);
  EXPECT_EQ(program.data, (std::vector<u64>{0x5678, 0x1234, 0x9ABCDEF0, 0x12345678}));
  tested.insert({"mov.b32 unpack", "mov.b64 unpack", "bra"});
}

// Moves bytes from offset 16 to offset 64 of the data, with one of the instructions in between.
TEST(PtxInstructions, LoadsAndStores) {
  for (const std::string& name : opcode_names()) {
    const bool loads = name.starts_with("ld.");
    if (!loads && !name.starts_with("st.")) continue;
    SCOPED_TRACE(name);
    tested.insert(name);
    const std::string type = name.substr(name.rfind('.') + 1);
    const bool is_shared = name.find("shared") != name.npos,
               is_vector = name.find(".v") != name.npos;
    const bool is_parameter = name.find("param") != name.npos;
    const int width = std::stoi(type.substr(1)), bytes = width / 8;
    const int count = is_vector ? name[name.find(".v") + 2] - '0' : 1;
    const std::string registers = width == 8 ? "%rs" : register_of(width);
    std::string values, code = "setp.ne.s32 %p1, %r0, 0;\n@%p1 ret;\nmov.u64 %rd7, buffer;\n";
    // Each register on its own.
    const auto move = [&](const std::string& instruction, const std::string& base, int offset) {
      for (int n = 1; n <= count; ++n, offset += bytes) {
        const std::string value = registers + std::to_string(n);
        const std::string address = "[" + base + "+" + std::to_string(offset) + "]";
        code += instruction + ".u" + std::to_string(width) + " ";
        code += instruction[0] == 'l' ? value + ", " + address : address + ", " + value;
        code += ";\n";
      }
    };
    for (int n = 1; n <= count; ++n)
      values += (n > 1 ? ", " : "") + (registers + std::to_string(n));
    if (is_vector) values = "{" + values + "}";
    if (!loads || is_shared) move("ld.global", "%rd0", 16);
    if (loads && is_shared) move("st.shared", "%rd7", 16);
    const std::string address = is_parameter ? "[test_param_1+16]"
                                : is_shared  ? "[%rd7+16]"
                                : loads      ? "[%rd0+16]"
                                             : "[%rd0+64]";
    code += name + (loads ? " " + values + ", " + address : " " + address + ", " + values) + ";\n";
    if (!loads && is_shared) move("ld.shared", "%rd7", 16);
    if (loads || is_shared) move("st.global", "%rd0", 64);
    Program program;
    auto* const data = reinterpret_cast<unsigned char*>(program.data.data());
    for (int n = 0; n < 32; ++n) data[n] = static_cast<unsigned char>(0x80 + n);
    program.run(code);
    EXPECT_EQ(std::memcmp(data + 64, data + 16, static_cast<std::size_t>(count * bytes)), 0);
  }
  // Extended by the sign.
  Program program;
  program.data[4] = 0x80000000;
  program.run("ld.param.s32 %rd3, [test_param_1+32];\nst.global.u64 [%rd1], %rd3;");
  EXPECT_EQ(program.data[0], 0xFFFFFFFF80000000);
}

TEST(PtxInstructions, OfWarps) {
  Program program;
  program.run(
      "shfl.sync.bfly.b32 %r1|%p1, %r0, 1, 31, -1;\nsetp.eq.s32 %p2, %r0, 7;\n"
      "vote.sync.any.pred %p3, %p2, -1;\nselp.b32 %r2, 100, 0, %p3;\nadd.s32 %r3, %r1, %r2;\n"
      "bar.warp.sync -1;\nst.global.u64 [%rd1], %r3;\natom.global.add.u32 %r4, [%rd0+512], 3;\n"
      "bar.sync 0;");
  for (u64 lane = 0; lane < kWarpLanes; ++lane) EXPECT_EQ(program.data[lane], (lane ^ 1) + 100);
  EXPECT_EQ(program.data[64], 3 * kWarpLanes);
  tested.insert(
      {"shfl.sync.bfly.b32",
       "vote.sync.any.pred",
       "bar.warp.sync",
       "atom.global.add.u32",
       "bar.sync"});
  Program none;
  none.run(
      "vote.sync.any.pred %p3, 0, -1;\nselp.b64 %rd2, 1, 0, %p3;\nst.global.u64 [%rd1], %rd2;");
  EXPECT_EQ(none.data[0], 0);
}

// The fragments are in the figures of "Matrix Fragments for mma.m16n8k8" and "m16n8k16". A, B and C
// have integers, exact in each type.
void check_mma(int k, const std::string& type, u64 (*encode)(int)) {
  const auto a = [](int row, int col) { return (row * 5 + col * 3) % 7 - 3; };
  const auto b = [](int row, int col) { return (row * 2 + col * 7) % 5 - 2; };
  const auto c = [](int row, int col) { return row - 4 * col; };
  const int packed = type == "tf32" ? 1 : 2, half = type == "tf32" ? 4 : 8;
  const int of_a = 16 * k / kWarpLanes / packed, of_b = of_a / 2, inputs = of_a + of_b + 4;
  Program program;
  auto* const words = reinterpret_cast<u32*>(program.data.data());
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    const int group = lane >> 2, thread = lane % 4;
    u32* const mine = words + inputs * lane;
    for (int e = 0; e < packed; ++e) {
      for (int n = 0; n < of_a; ++n) {
        const int row = group + (n % 2 == 0 ? 0 : 8),
                  col = packed * thread + e + (n < 2 ? 0 : half);
        mine[n] |= static_cast<u32>(encode(a(row, col)) << (16 * e));
      }
      for (int n = 0; n < of_b; ++n) {
        const int row = packed * thread + e + (n == 0 ? 0 : half);
        mine[of_a + n] |= static_cast<u32>(encode(b(row, group)) << (16 * e));
      }
    }
    for (int n = 0; n < 4; ++n) {
      const int row = group + (n < 2 ? 0 : 8), col = 2 * thread + n % 2;
      mine[of_a + of_b + n] = static_cast<u32>(bits(static_cast<float>(c(row, col))));
    }
  }
  const auto list = [](int first, int count) {
    std::string text;
    for (int n = 0; n < count; ++n) text += (n > 0 ? ", %w" : "%w") + std::to_string(first + n);
    return "{" + text + "}";
  };
  std::string code = ".reg .b32 %w<20>;\nmul.wide.u32 %rd2, %r0, " + std::to_string(4 * inputs) +
                     ";\nadd.s64 %rd2, %rd0, %rd2;\n";
  for (int n = 0; n < inputs; ++n) {
    code += "ld.global.u32 %w" + std::to_string(n) + ", [%rd2+" + std::to_string(4 * n) + "];\n";
  }
  const std::string name =
      "mma.sync.aligned.m16n8k" + std::to_string(k) + ".row.col.f32." + type + "." + type + ".f32";
  tested.insert(name);
  code += name + " " + list(inputs, 4) + ", " + list(0, of_a) + ", " + list(of_a, of_b) + ", " +
          list(of_a + of_b, 4) + ";\n";
  for (int n = 0; n < 4; ++n) {  // over C
    code += "st.global.u32 [%rd2+" + std::to_string(4 * (of_a + of_b + n)) + "], %w" +
            std::to_string(inputs + n) + ";\n";
  }
  program.run(code);
  for (int row = 0; row < 16; ++row) {
    for (int col = 0; col < 8; ++col) {
      int sum = c(row, col);
      for (int n = 0; n < k; ++n) sum += a(row, n) * b(n, col);
      const int lane = row % 8 * 4 + col / 2, n = row / 8 * 2 + col % 2;
      const u32 word = words[inputs * lane + of_a + of_b + n];
      EXPECT_EQ(std::bit_cast<float>(word), static_cast<float>(sum)) << name << row << ' ' << col;
    }
  }
}

TEST(PtxInstructions, Mma) {
  const auto half = [](int x) -> u64 {
    return lltm::cpu::narrow<lltm::cpu::Half>(static_cast<float>(x)).bits;
  };
  check_mma(16, "f16", half);
  check_mma(8, "f16", half);
  check_mma(16, "bf16", [](int x) -> u64 { return bits(static_cast<float>(x)) >> 16; });
  // Without the 13 low bits.
  check_mma(8, "tf32", [](int x) -> u64 { return bits(static_cast<float>(x)) | 0x1FFF; });
}

TEST(PtxInstructions, EachIsTested) {
  if (tested.size() < 10) GTEST_SKIP() << "only with the other tests";
  for (const std::string& name : opcode_names()) EXPECT_TRUE(tested.contains(name)) << name;
}

// ---- Errors -------------------------------------------------------------------

constexpr Launch kTwoWarps = {{1, 1, 1}, 2 * kWarpLanes};
// Of each thread, in shared memory; its neighbor in the other warp.
const std::string kPlaces =
    "and.b32 %r1, %r0, 7;\nshl.b32 %r1, %r1, 2;\ncvt.u64.u32 %rd2, %r1;\n"
    "setp.lt.u32 %p1, %r0, 8;\nsetp.gt.u32 %p2, %r0, 55;\n";

TEST(PtxErrors, Programs) {
  expect_error("nothing.s32 %r1, %r2;", "unknown instruction nothing.s32 %r1, %r2");
  expect_error("add.s32 %r1, %r2;", "missing operands");
  expect_error("add.s32 %r1, %r2, %r3, %r4;", "unexpected operands");
  expect_error("add.s32 %r1, %r2, %rd3;", "another width");
  expect_error("add.s32 %r1, %r2, %x;", "unknown operand %x");
  expect_error("bra $nowhere;", "no label $nowhere");
}

TEST(PtxErrors, Addresses) {
  expect_error("ld.global.u64 %rd3, [%rd1+4];", "an unaligned address");
  expect_error("ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1];", "an unaligned address");
  expect_error("ld.global.u64 %rd3, [%rd0+2048];", "a foreign address");
  expect_error("st.global.u64 [%rd0+-8], %rd3;", "a foreign address");
  expect_error("ld.shared.u32 %r1, [buffer+64];", "outside of shared memory");
  expect_error("ld.param.u64 %rd3, [test_param_0+64];", "outside of the parameters");
}

TEST(PtxErrors, RacesInSharedMemory) {
  const std::string store = kPlaces + "@%p1 st.shared.u32 [%rd2], %r0;\n";
  const std::string load = "@%p2 ld.shared.u32 %r3, [%rd2];\n";
  expect_error(store + load, "race", kTwoWarps);
  expect_error(kPlaces + load + "@%p1 st.shared.u32 [%rd2], %r0;", "race", kTwoWarps);
  Program().run(store + "bar.sync 0;\n" + load, kTwoWarps);
}

TEST(PtxErrors, RacesInGlobalMemory) {
  const std::string store = "setp.eq.s32 %p1, %r0, 3;\n@%p1 st.global.u32 [%rd0], %r0;\n";
  const std::string publish =
      "setp.eq.s32 %p2, %r0, 4;\n@%p2 st.relaxed.gpu.global.b32 [%rd0], %r0;\n";
  const std::string load = "ld.global.u32 %r1, [%rd0];\n";
  expect_error(store + load, "race");
  expect_error(load + store, "race");
  expect_error(publish + load, "a published word needs relaxed accesses");
  expect_error(load + publish, "race");
  expect_error(publish + publish, "published twice");
  expect_error(publish + store, "a published word needs relaxed accesses");
}

TEST(PtxErrors, LanesThatDiverged) {
  const std::string zero = "%r1, %r1, %r1, %r1";
  const std::string mma = "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {" + zero + "}, {" +
                          zero + "}, {%r1, %r1}, {" + zero + "};\n";
  const std::string diverge =
      "mov.u32 %r2, 0;\n$again:\nadd.s32 %r2, %r2, 1;\nsetp.lt.s32 %p1, %r2, %r0;\n"
      "@%p1 bra $again;\n";
  expect_error(diverge + mma, "the lanes left a loop at different times");
  Program().run(diverge + "bar.warp.sync -1;\n" + mma);
  expect_error(
      "setp.lt.s32 %p1, %r0, 7;\n@%p1 bra $end;\n" + mma + "$end:\nbar.warp.sync -1;",
      "wait at different places");
  expect_error(
      "setp.lt.s32 %p1, %r0, 7;\n@%p1 bra $end;\nbar.sync 0;\n$end:\nbar.sync 0;",
      "different barriers");
  expect_error("bar.warp.sync 7;", "unknown lane mask");
}

TEST(PtxErrors, Endless) {
  expect_error("$again:\nbra.uni $again;", "too many instructions");
}

// A consumer sees each of four words become visible at another time, and in any order.
TEST(PtxStores, BecomeVisibleLateAndInAnyOrder) {
  std::set<u64> seen;
  for (u64 seed = 1; seed < 60; ++seed) {
    Program program;
    program.options.seed = seed;
    // Warp 0 publishes four words; a lane of warp 1 counts which words it sees at first.
    program.run(
        "setp.lt.s32 %p1, %r0, 4;\nshl.b32 %r1, %r0, 2;\ncvt.u64.u32 %rd2, %r1;\n"
        "add.s64 %rd2, %rd0, %rd2;\n@%p1 st.relaxed.gpu.global.b32 [%rd2+512], 1;\n"
        "setp.ne.s32 %p2, %r0, 40;\n@%p2 ret;\n$again:\n"
        "ld.relaxed.gpu.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd0+512];\n"
        "shl.b32 %r2, %r2, 1;\nshl.b32 %r3, %r3, 2;\nshl.b32 %r4, %r4, 3;\n"
        "or.b32 %r1, %r1, %r2;\nor.b32 %r3, %r3, %r4;\nor.b32 %r1, %r1, %r3;\n"
        "setp.eq.s32 %p3, %r1, 0;\n@%p3 bra $again;\nst.global.u32 [%rd0], %r1;",
        kTwoWarps);
    seen.insert(program.data[0]);
  }
  EXPECT_GE(seen.size(), 8U);  // of 15
}

}  // namespace
}  // namespace ptx
