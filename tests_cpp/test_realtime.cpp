// lltm/realtime.h: values, and what process() must not do. tests_cpp/test_save_realtime.cpp
// compares with layers of liblltm.
#include "cell/cells.h"
#include "cell_program.h"
#include "cpu_features.h"
#include "realtime/table.h"

#include <lltm/realtime.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define LLTM_COUNTS_CALLS
#include <dlfcn.h>
#include <pthread.h>

namespace {
std::atomic<int> forbidden_calls{-1};  // counted from 0 on
void count_call() {
  if (forbidden_calls >= 0) ++forbidden_calls;
}
}  // namespace

// Of the entire program, including operator new and the standard library.
extern "C" {
void* __libc_malloc(std::size_t bytes);
void __libc_free(void* memory);
void* malloc(std::size_t bytes) {
  count_call();
  return __libc_malloc(bytes);
}
void free(void* memory) {
  count_call();
  __libc_free(memory);
}
int pthread_mutex_lock(pthread_mutex_t* mutex) noexcept {
  count_call();
  static const auto real =
      reinterpret_cast<int (*)(pthread_mutex_t*)>(dlsym(RTLD_NEXT, "pthread_mutex_lock"));
  return real(mutex);
}
}
#endif

namespace lltm::realtime {
namespace {

using Shape = std::vector<std::int64_t>;
struct Tensor {
  Shape shape;
  std::vector<float> values;
};
using Tensors = std::map<std::string, Tensor>;

std::string json_text(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '\n' ? "\\n" : std::string(1, c);
  return quoted + "\"";
}

std::string file_of(
    const Tensors& tensors, const std::string& cell, const std::string& version = "1") {
  std::ostringstream header;
  header << R"({"__metadata__": {"lltm.realtime": )" << json_text(version) << R"(, "cell": )"
         << json_text(cell) << "}";
  std::string data;
  for (const auto& [name, tensor] : tensors) {
    header << ", " << json_text(name) << R"(: {"dtype": "F32", "shape": [)";
    for (std::size_t k = 0; k < tensor.shape.size(); ++k) {
      header << (k == 0 ? "" : ", ") << tensor.shape[k];
    }
    header << R"(], "data_offsets": [)" << data.size() << ", ";
    data.append(reinterpret_cast<const char*>(tensor.values.data()), 4 * tensor.values.size());
    header << data.size() << "]}";
  }
  header << "}";
  const std::string text = header.str();
  std::string file(8, '\0');
  const std::uint64_t length = text.size();
  std::memcpy(file.data(), &length, sizeof(length));
  return file + text + data;
}

std::span<const std::byte> bytes(const std::string& file) {
  return std::as_bytes(std::span(file.data(), file.size()));
}

std::mt19937 generator(0);
std::vector<float> random(std::int64_t count, float scale) {
  std::uniform_real_distribution<float> uniform(-scale, scale);
  std::vector<float> values(count);
  for (float& value : values) value = uniform(generator);
  return values;
}

// A layer and its definition in float64.
struct Model {
  Model(std::string cell_name, std::int64_t l, std::int64_t i, std::int64_t h)
      : name(std::move(cell_name)), layers(l), input(i), hidden(h) {
    Cells::for_each([&]<typename Definition>(Definition) {
      if (name != Definition::kCell.name) return;
      info = Definition::kCell;
      compute = [](const std::vector<double>& in) {
        double z[Definition::kSlots];
        std::copy_n(in.begin(), Definition::kSlots, z);
        const auto next = Definition::forward(z, in[Definition::kSlots]);
        return std::vector<double>{next.h, next.c};
      };
    });
    if (compute == nullptr) {
      text = parse_cell(name);
      info = text->info;
    }
    const float scale = 1 / std::sqrt(static_cast<float>(hidden));
    for (std::int64_t k = 0; k < layers; ++k) {
      const std::int64_t columns = k == 0 ? input : hidden;
      const std::int64_t x = info.x.count() * hidden, h_rows = info.h.count() * hidden;
      const auto add = [&](const char* stem, const Shape& shape) {
        std::int64_t count = 1;
        for (const std::int64_t size : shape) count *= size;
        tensors[stem + ("_l" + std::to_string(k))] = {shape, random(count, scale)};
      };
      add("weight_ih", {x, columns});
      add("weight_hh", {h_rows, hidden});
      add("bias_ih", {x + info.parameters * hidden});
      add("bias_hh", {h_rows});
    }
  }

  double initial(int column) const {
    const int state = column - (info.reads_h ? 1 : 0);
    return text == nullptr || state < 0 ? 0 : text->initial_states[state];
  }

  // (steps, H) from (steps, I), of one sequence.
  std::vector<double> run(const std::vector<float>& x) const {
    std::vector<double> sequence(x.begin(), x.end());
    for (std::int64_t k = 0; k < layers; ++k) sequence = run_layer(k, sequence);
    return sequence;
  }

  std::vector<double> run_layer(std::int64_t k, const std::vector<double>& x) const {
    const auto of = [&](const char* stem) -> const std::vector<float>& {
      return tensors.at(stem + ("_l" + std::to_string(k))).values;
    };
    const std::int64_t columns = k == 0 ? input : hidden;
    const int states = info.state_columns();
    std::vector<double> h(hidden), c(states * hidden), output;
    for (std::int64_t j = 0; j < states * hidden; ++j) c[j] = initial(static_cast<int>(j / hidden));
    const auto dot = [](const float* w, const double* a, std::int64_t n) {
      double sum = 0;
      for (std::int64_t i = 0; i < n; ++i) sum += double{w[i]} * a[i];
      return sum;
    };
    for (std::size_t first = 0; first < x.size(); first += columns) {
      std::vector<double> next(hidden);
      for (std::int64_t unit = 0; unit < hidden; ++unit) {
        std::vector<double> in;
        for (int s = 0; s < info.slots; ++s) {
          double z = 0;
          if (info.x.contains(s)) {
            const std::int64_t row = info.x_blocks[s] * hidden + unit;
            z += of("bias_ih")[row] + dot(&of("weight_ih")[row * columns], &x[first], columns);
          }
          if (info.h.contains(s)) {
            const std::int64_t row = info.h_blocks[s] * hidden + unit;
            z += of("bias_hh")[row] + dot(&of("weight_hh")[row * hidden], h.data(), hidden);
          }
          in.push_back(z);
        }
        for (int s = 0; s < states; ++s) in.push_back(c[s * hidden + unit]);
        for (int p = 0; p < info.parameters; ++p) {
          in.push_back(of("bias_ih")[(info.x.count() + p) * hidden + unit]);
        }
        std::vector<double> out;
        if (compute != nullptr) {
          out = compute(in);
        } else {
          out = lltm_test::run_program(info.forward().program(), in);
          if (info.reads_h) out.insert(out.begin(), out[0]);  // h' and then c, which begins with h'
        }
        next[unit] = out[0];
        for (int s = 0; s < states; ++s) c[s * hidden + unit] = out[1 + s];
      }
      h = next;
      output.insert(output.end(), h.begin(), h.end());
    }
    return output;
  }

  std::string file() const { return file_of(tensors, name); }

  std::string name;
  std::int64_t layers, input, hidden;
  CellInfo info = {};
  std::unique_ptr<const CellText> text;
  std::vector<double> (*compute)(const std::vector<double>&) = nullptr;
  Tensors tensors;
};

std::vector<std::string> cells() {
  // Not kEveryText, whose discontinuities amplify rounding errors.
  std::vector<std::string> names = {
      lltm_test::kDuoText, lltm_test::kAloneText, lltm_test::kLimitsText};
  for (const CellInfo* cell : kCells) names.emplace_back(cell->name);
  return names;
}

struct Isa {
  const char* name;
  const Kernels* (*kernels)();
};
void PrintTo(const Isa& isa, std::ostream* stream) {
  *stream << isa.name;
}

class Realtime : public testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    const Kernels* const kernels = GetParam().kernels();
    if (kernels == nullptr || !lltm_test::cpu_has(GetParam().name)) {
      GTEST_SKIP() << "this CPU or this compiler has none";
    }
    chosen_by_test = kernels;
  }
  void TearDown() override { chosen_by_test = nullptr; }
};
INSTANTIATE_TEST_SUITE_P(
    Kernels,
    Realtime,
    testing::Values(
        Isa{"default", kernels_default}, Isa{"avx2", kernels_avx2}, Isa{"avx512", kernels_avx512}),
    [](const auto& info) { return info.param.name; });

TEST_P(Realtime, EqualsFloat64) {
  constexpr std::int64_t kSteps = 40;
  const std::int64_t sizes[][3] = {{1, 1, 16}, {2, 3, 5}, {1, 40, 65}, {3, 1, 24}, {1, 130, 9}};
  for (const std::string& name : cells()) {
    for (const auto [layers, input, hidden] : sizes) {
      const Model model(name, layers, input, hidden);
      SCOPED_TRACE(testing::Message() << name.substr(0, 40) << " " << layers << " " << hidden);
      Layer layer(bytes(model.file()));
      const std::vector<float> x = random(kSteps * input, 1);
      std::vector<float> y(kSteps * hidden);
      layer.process(x.data(), y.data(), kSteps);
      const std::vector<double> expected = model.run(x);
      double largest = 1, error = 0;
      for (std::size_t k = 0; k < y.size(); ++k) {
        largest = std::max(largest, std::fabs(expected[k]));
        error = std::max(error, std::fabs(y[k] - expected[k]));
      }
      EXPECT_LT(error, 2e-6 * largest);
    }
  }
}

TEST_P(Realtime, InfinitiesSaturateAndNanStays) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const char* const name : {"lstm", "gru", "rnn_tanh"}) {
    const Model model(name, /*layers=*/1, /*input=*/1, /*hidden=*/21);
    Layer layer(bytes(model.file()));
    const std::vector<float> x = {0.5f, kInfinity, -0.5f, -kInfinity, 1.0f, NAN};
    std::vector<float> y(x.size() * 21);
    layer.process(x.data(), y.data(), static_cast<std::int64_t>(x.size()));
    const std::vector<double> expected = model.run(x);
    for (std::size_t k = 0; k < 5 * 21; ++k) EXPECT_NEAR(y[k], expected[k], 2e-6) << name << k;
    for (std::size_t k = 5 * 21; k < y.size(); ++k) EXPECT_TRUE(std::isnan(y[k])) << name << k;
  }
}

// Also of several sequences, whose results are those of each alone.
TEST_P(Realtime, CallsMayDivideASequence) {
  constexpr std::int64_t kSteps = 70, kBatch = 3;
  for (const std::string& name : cells()) {
    const Model model(name, /*layers=*/2, /*input=*/3, /*hidden=*/21);
    const std::string file = model.file();
    Layer layer(bytes(file), kBatch);
    const std::vector<float> x = random(kSteps * kBatch * 3, 1);
    std::vector<float> y(kSteps * kBatch * 21), again(y.size());
    layer.process(x.data(), y.data(), kSteps);
    layer.reset();
    std::vector<float> state(layer.state_size());
    Layer other(bytes(file), kBatch);
    std::int64_t at = 0;
    for (const std::int64_t count : {1, 0, 31, 2, -1, 36}) {  // by turns
      Layer& now = count % 2 == 0 ? other : layer;
      Layer& next = count % 2 == 0 ? layer : other;
      now.process(x.data() + at * kBatch * 3, again.data() + at * kBatch * 21, count);
      now.get_state(state.data());
      next.set_state(state.data());
      layer.set_state(state.data());
      other.set_state(state.data());
      at += std::max<std::int64_t>(count, 0);
    }
    ASSERT_EQ(at, kSteps);
    EXPECT_EQ(y, again);
    for (std::int64_t b = 0; b < kBatch; ++b) {
      Layer alone(bytes(file));
      for (std::int64_t t = 0; t < kSteps; ++t) {
        std::vector<float> h(21);
        alone.process(&x[(t * kBatch + b) * 3], h.data(), 1);
        ASSERT_TRUE(std::equal(h.begin(), h.end(), &y[(t * kBatch + b) * 21])) << t;
      }
    }
  }
}

#if defined(LLTM_COUNTS_CALLS)
TEST_P(Realtime, TheFirstCallAllocatesNothingAndLocksNothing) {
  for (const std::string& name : cells()) {
    const Model model(name, /*layers=*/2, /*input=*/1, /*hidden=*/20);
    Layer layer(bytes(model.file()));
    std::vector<float> x(100, 0.5f), y(100 * 20);
    forbidden_calls = 0;
    layer.process(x.data(), y.data(), 100);
    layer.reset();
    layer.process(x.data(), y.data(), 1);
    EXPECT_EQ(forbidden_calls.exchange(-1), 0);
  }
}

// In this mode the kernel kills a process that calls it, except to read, write and exit: malloc
// that grows, locks that wait, threads.
TEST_P(Realtime, TheFirstCallDoesNotCallTheOperatingSystem) {
  for (const std::string& name : cells()) {
    const Model model(name, /*layers=*/2, /*input=*/1, /*hidden=*/20);
    Layer layer(bytes(model.file()));
    std::vector<float> x(100, 0.5f), y(100 * 20);
    const pid_t child = fork();
    if (child == 0) {
      if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT) != 0) syscall(SYS_exit, 77);
      layer.process(x.data(), y.data(), 100);
      layer.reset();
      syscall(SYS_exit, 3);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 77) GTEST_SKIP() << "no seccomp";
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 3) << name.substr(0, 40) << status;
  }
}
#endif

TEST_P(Realtime, TheCallersFloatingPointModeIsRestored) {
  const Model model("lstm", 1, 1, 16);
  Layer layer(bytes(model.file()));
  const std::vector<float> x = random(50, 1);
  std::vector<float> y(50 * 16), again(y.size());
  layer.process(x.data(), y.data(), 50);
  layer.reset();
  std::fesetround(FE_UPWARD);
  layer.process(x.data(), again.data(), 50);
  EXPECT_EQ(std::fegetround(), FE_UPWARD);
  std::fesetround(FE_TONEAREST);
  EXPECT_EQ(y, again);
  // Subnormal numbers: zero inside, unchanged outside.
  volatile float tiny = std::numeric_limits<float>::min();
  EXPECT_GT(tiny / 2, 0.0f);
  std::vector<float> state(layer.state_size(), std::numeric_limits<float>::denorm_min());
  layer.set_state(state.data());
  layer.process(x.data(), again.data(), 50);
  EXPECT_GT(tiny / 2, 0.0f);
}

// ---- files ------------------------------------------------------------------------

std::string error_of(const std::string& file, std::int64_t batch = 1) {
  try {
    Layer layer(bytes(file), batch);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

TEST(RealtimeFile, WrongFilesAreDescribed) {
  const Model model("gru", 2, 3, 5);
  const auto with = [&](const std::string& name, const Tensor& tensor) {
    Tensors changed = model.tensors;
    changed[name] = tensor;
    return file_of(changed, "gru");
  };
  const auto without = [&](const std::string& name) {
    Tensors changed = model.tensors;
    changed.erase(name);
    return file_of(changed, "gru");
  };
  const Tensor small = {{2}, {1, 2}}, none = {{0, 5}, {}};
  const std::pair<std::string, std::string> wrong[] = {
      {"", "expected a file of lltm.realtime.save, got a file of 0 bytes"},
      {"hello world", "expected a file of lltm.realtime.save, got a file of 11 bytes"},
      {file_of(model.tensors, "gru", "2"), "expected a file of version 1, got \"2\""},
      {file_of(model.tensors, "gruu"), "expected a cell's name or text, got \"gruu\""},
      {file_of(model.tensors, "lltm-cell 1\\nname"), "cell"},
      {file_of({}, lltm_test::kStagedText),
       "expected a cell without gates in the input, got staged"},
      {file_of(model.tensors, "lstm"), "expected weight_ih_l0 of dtype F32 and shape (20, 3)"},
      {without("weight_hh_l0"), "got no such matrices"},
      {without("bias_hh_l1"), "expected tensor bias_hh_l1, got a file without it"},
      {without("weight_ih_l1"), "expected no other tensors, got \"bias_hh_l1\""},
      {with("extra", small), "expected no other tensors, got \"extra\""},
      {with("bias_ih_l0", small), "expected bias_ih_l0 of dtype F32 and shape (15,), got"},
      {with("weight_ih_l0", none), "expected weight_ih_l0 of dtype F32 and shape (15, 5)"},
  };
  EXPECT_EQ(error_of(model.file()), "");
  for (const auto& [file, expected] : wrong) {
    EXPECT_NE(error_of(file).find(expected), std::string::npos) << error_of(file);
    EXPECT_TRUE(error_of(file).starts_with("lltm::realtime: bytes: "));
  }
  for (const std::int64_t batch : {-1, 0, 1 << 30}) {
    EXPECT_NE(error_of(model.file(), batch).find("expected a batch size"), std::string::npos);
  }
}

// A damaged file is an error, or another layer.
TEST(RealtimeFile, DamagedFilesDoNotCrash) {
  for (const std::string& name : {std::string("lstm"), lltm_test::kDuoText}) {
    const std::string file = Model(name, 2, 2, 3).file();
    const std::size_t header = file.find("}}") + 2;
    int errors = 0;
    for (int k = 0; k < 20'000; ++k) {
      std::string damaged = file;
      const int edits = 1 + static_cast<int>(generator() % 3);
      for (int edit = 0; edit < edits; ++edit) {
        const std::size_t at = generator() % (generator() % 2 == 0 ? header : file.size());
        if (at >= damaged.size()) continue;
        switch (generator() % 4) {
          case 0:
            damaged[at] = static_cast<char>(generator());
            break;
          case 1:
            damaged[at] = "0123456789[]{},:\"-"[generator() % 18];
            break;
          case 2:
            damaged.erase(at, generator() % 9);
            break;
          default:
            damaged.insert(at, damaged, generator() % damaged.size(), generator() % 9);
        }
      }
      try {
        Layer layer(bytes(damaged));
        std::vector<float> x(4 * layer.input_size()), y(4 * layer.hidden_size());
        layer.process(x.data(), y.data(), 4);
      } catch (const std::invalid_argument&) {
        ++errors;
      }
    }
    EXPECT_GT(errors, 10'000);
  }
}

TEST(RealtimeFile, TheCInterfaceReportsErrors) {
  const std::string path = testing::TempDir() + "lltm_realtime_test.rt";
  const Model model("rnn_tanh", 1, 2, 3);
  std::ofstream(path, std::ios::binary) << model.file();
  char error[200] = "unchanged";
  lltm_realtime* const layer = lltm_realtime_load(path.c_str(), 1, error, sizeof(error));
  ASSERT_NE(layer, nullptr) << error;
  EXPECT_STREQ(error, "unchanged");
  std::int64_t input_size = 0, hidden_size = 0;
  lltm_realtime_sizes(layer, &input_size, &hidden_size);
  EXPECT_EQ(input_size, 2);
  EXPECT_EQ(hidden_size, 3);
  const std::vector<float> x = random(8, 1);
  std::vector<float> y(12), again(12);
  lltm_realtime_process(layer, x.data(), y.data(), 4);
  lltm_realtime_reset(layer);
  lltm_realtime_process(layer, x.data(), again.data(), 4);
  EXPECT_EQ(y, again);
  lltm_realtime_free(layer);
  lltm_realtime_free(nullptr);
  std::remove(path.c_str());

  EXPECT_EQ(lltm_realtime_load(path.c_str(), 1, error, sizeof(error)), nullptr);
  EXPECT_EQ(error, "lltm::realtime: " + path + ": cannot be read");
  EXPECT_EQ(lltm_realtime_load(path.c_str(), 1, error, 6), nullptr);
  EXPECT_STREQ(error, "lltm:");
  EXPECT_EQ(lltm_realtime_load(nullptr, 1, nullptr, 0), nullptr);
}

}  // namespace
}  // namespace lltm::realtime
