// Loads layers and runs them.
#include "cell/program_text.h"
#include "common/safetensors.h"
#include "realtime/format.h"
#include "realtime/table.h"

#include <lltm/realtime.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <fstream>
#include <map>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace lltm::realtime {
namespace {

using Size = std::int64_t;

constexpr Size kLargest = Size{1} << 24;     // of a size
constexpr Size kMostFloats = Size{1} << 38;  // of an array
constexpr Size kMostBytes = 4 * kMostFloats;
constexpr Size kChunk = 32;  // steps that several layers compute together

std::invalid_argument wrong(const std::string& expected, const std::string& got) {
  return std::invalid_argument("expected " + expected + ", got " + got);
}

std::string text_of(const std::vector<std::uint64_t>& shape) {
  std::string text = "(";
  for (const std::uint64_t size : shape)
    text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + (shape.size() == 1 ? ",)" : ")");
}

// ---- the file ---------------------------------------------------------------------

class File {
 public:
  explicit File(std::span<const std::byte> bytes) {
    const std::string_view all(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    const std::uint64_t header =
        safetensors::header_bytes(all.substr(0, safetensors::kLengthBytes), all.size());
    data_ = all.substr(safetensors::kLengthBytes + header);
    auto parsed =
        safetensors::parse_header(all.substr(safetensors::kLengthBytes, header), data_.size());
    metadata_ = std::move(parsed.metadata);
    for (auto& entry : parsed.entries) {
      const std::string name = entry.name;
      entries_.emplace(name, std::move(entry));
    }
  }

  const std::string& metadata(const std::string& key) const {
    const auto found = metadata_.find(key);
    if (found == metadata_.end()) {
      throw wrong("a file of lltm.realtime.save", "a safetensors file without the metadata " + key);
    }
    return found->second;
  }

  // Columns of weight_ih_lk, or -1.
  Size columns(const std::string& name) const {
    const auto found = entries_.find(name);
    if (found == entries_.end() || found->second.shape.size() != 2) return -1;
    return static_cast<Size>(std::min<std::uint64_t>(found->second.shape[1], kLargest + 1));
  }

  // Removes the tensor.
  std::vector<float> take(const std::string& name, const std::vector<std::uint64_t>& shape) {
    const auto found = entries_.find(name);
    if (found == entries_.end()) throw wrong("tensor " + name, "a file without it");
    const safetensors::Entry entry = std::move(found->second);
    entries_.erase(found);
    if (entry.dtype != "F32" || entry.shape != shape) {
      throw wrong(
          name + " of dtype F32 and shape " + text_of(shape),
          safetensors::name_text(entry.dtype) + " and " + text_of(entry.shape));
    }
    safetensors::check_bytes(entry, sizeof(float));
    std::vector<float> values(entry.bytes() / sizeof(float));
    if (!values.empty()) std::memcpy(values.data(), data_.data() + entry.begin, entry.bytes());
    return values;
  }

  void expect_no_more() const {
    if (entries_.empty()) return;
    throw wrong("no other tensors", safetensors::name_text(entries_.begin()->first));
  }

 private:
  std::string_view data_;
  std::map<std::string, std::string> metadata_;
  std::map<std::string, safetensors::Entry> entries_;
};

// ---- memory -----------------------------------------------------------------------

struct Free {
  void operator()(std::byte* memory) const { ::operator delete[](memory, std::align_val_t{64}); }
};

// Zeroed arrays, aligned to cache lines.
class Arena {
 public:
  template <typename T = float>
  T* take(std::initializer_list<Size> sizes) {
    Size count = 1;
    for (const Size size : sizes) {
      if (__builtin_mul_overflow(count, size, &count) || count > kMostFloats) {
        throw std::invalid_argument("expected a layer of at most 2^38 values");
      }
    }
    count = std::max<Size>(count, 1);
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(T);
    arrays_.emplace_back(new (std::align_val_t{64}) std::byte[bytes]());
    bytes_ += bytes;
    return reinterpret_cast<T*>(arrays_.back().get());
  }
  std::size_t bytes() const { return bytes_; }

 private:
  std::vector<std::unique_ptr<std::byte[], Free>> arrays_;
  std::size_t bytes_ = 0;
};

// Appends a block's weights of one operand (LayerView), in rows of `width` units.
float* pack(
    float* to,
    const std::vector<float>& matrix,
    Size columns,
    SlotRange slots,
    const int* blocks,
    Size hidden,
    Size first,
    Size width) {
  const Size units = std::min(width, hidden - first);
  for (int group = slots.begin; group < slots.end; group += kGroup) {
    const int end = std::min(slots.end, group + kGroup);
    for (Size k = 0; k < columns; ++k) {
      for (int slot = group; slot < end; ++slot, to += width) {
        const float* const column = matrix.data() + (blocks[slot] * hidden + first) * columns + k;
        for (Size unit = 0; unit < units; ++unit) to[unit] = column[unit * columns];
      }
    }
  }
  return to;
}

LayerView read_layer(
    File& file, Arena& arena, const CellInfo& cell, Size k, Size input, Size hidden, Size batch) {
  const auto take = [&](const char* stem, Size rows, Size columns = -1) {
    std::vector<std::uint64_t> shape = {static_cast<std::uint64_t>(rows * hidden)};
    if (columns >= 0) shape.push_back(static_cast<std::uint64_t>(columns));
    return file.take(stem + ("_l" + std::to_string(k)), shape);
  };
  const int x = cell.x.count(), h = cell.h.count();
  const auto weight_ih = take("weight_ih", x, input), weight_hh = take("weight_hh", h, hidden);
  const auto bias_ih = take("bias_ih", x + cell.parameters), bias_hh = take("bias_hh", h);

  const Size padded = (hidden + kUnits - 1) / kUnits * kUnits;
  float* const weights = arena.take({padded, x * input + h * hidden});
  auto* const begins = arena.take<Size>({padded / kUnits + 1});
  float* to = weights;
  for (Size first = 0; first < hidden; first += kUnits) {
    begins[first / kUnits + 1] = std::min(first + kUnits, hidden);
    const Size width = cell.native != 0 ? std::min(kUnits, hidden - first) : kUnits;
    to = pack(to, weight_ih, input, cell.x, cell.x_blocks, hidden, first, width);
    to = pack(to, weight_hh, hidden, cell.h, cell.h_blocks, hidden, first, width);
  }
  float* const bias = arena.take({cell.slots, padded});
  float* const parameters = arena.take({cell.parameters, padded});
  for (Size unit = 0; unit < hidden; ++unit) {
    for (int slot = 0; slot < cell.slots; ++slot) {
      float& sum = bias[slot * padded + unit];
      if (cell.x.contains(slot)) sum += bias_ih[cell.x_blocks[slot] * hidden + unit];
      if (cell.h.contains(slot)) sum += bias_hh[cell.h_blocks[slot] * hidden + unit];
    }
    for (int p = 0; p < cell.parameters; ++p) {
      parameters[p * padded + unit] = bias_ih[(x + p) * hidden + unit];
    }
  }
  LayerView layer = {};
  layer.cell = &cell;
  layer.input = input;
  layer.hidden = hidden;
  layer.padded = padded;
  layer.batch = batch;
  layer.x_step = batch * input;
  layer.y_step = batch * hidden;
  layer.weights = weights;
  layer.blocks = padded / kUnits;
  layer.begins = begins;
  layer.bias = bias;
  layer.h = arena.take({batch, hidden});
  layer.c = arena.take({batch, cell.state_columns(), padded});
  if (cell.native == 0) {
    layer.parameters = parameters;
    layer.z = arena.take({cell.slots, padded});
    layer.registers = arena.take<std::byte>({static_cast<Size>(best_kernels().registers_bytes)});
    best_kernels().make_registers(layer);
  }
  return layer;
}

// Subnormal numbers are slow. Also no other mode of the caller's changes results, and no exception
// becomes a signal.
class FloatingPointMode {
 public:
#if defined(__x86_64__)
  FloatingPointMode() : before_(_mm_getcsr()) { _mm_setcsr(0x1F80 | 0x8040); }
  ~FloatingPointMode() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#elif defined(__aarch64__)
  FloatingPointMode() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" : : "r"(std::uint64_t{1} << 24));
  }
  ~FloatingPointMode() { asm volatile("msr fpcr, %0" : : "r"(before_)); }

 private:
  std::uint64_t before_;
#else
  FloatingPointMode() {}
#endif
  FloatingPointMode(const FloatingPointMode&) = delete;
};

}  // namespace

const Kernels& best_kernels() {
  if (chosen_by_test != nullptr) return *chosen_by_test;
  static const Kernels& best = [&]() -> const Kernels& {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (avx2 && avx512 && kernels_avx512() != nullptr) return *kernels_avx512();
    if (avx2 && kernels_avx2() != nullptr) return *kernels_avx2();
#endif
    return *kernels_default();
  }();
  return best;
}

// ---- Layer ------------------------------------------------------------------------

struct Layer::Memory {
  Memory(std::span<const std::byte> bytes, Size batch) {
    if (batch < 1 || batch > kLargest) {
      throw wrong("a batch size from 1 to 2^24", std::to_string(batch));
    }
    File file(bytes);
    const std::string& version = file.metadata(kVersionKey);
    if (version != kVersion) {
      throw wrong("a file of version " + std::string(kVersion), safetensors::name_text(version));
    }
    find_cell(file.metadata(kCellKey));
    const Size hidden = file.columns("weight_hh_l0");
    Size input = file.columns("weight_ih_l0");
    for (const Size size : {hidden, input}) {
      if (size < 1 || size > kLargest) {
        throw wrong(
            "weight_ih_l0 (., I) and weight_hh_l0 (., H) with I and H from 1 to 2^24",
            size < 0 ? "no such matrices" : std::to_string(size));
      }
    }
    while (file.columns("weight_ih_l" + std::to_string(layers.size())) >= 0) {
      const auto k = static_cast<Size>(layers.size());
      layers.push_back(read_layer(file, arena, *cell, k, input, hidden, batch));
      input = hidden;
    }
    file.expect_no_more();
    if (layers.size() > 1) {
      for (float*& each : between) each = arena.take({kChunk, batch, hidden});
    }
    run = best_kernels().run[cell->native];
  }

  void find_cell(const std::string& name) {
    Cells::for_each([&]<typename Definition>(Definition) {
      if (name != Definition::kCell.name) return;
      built_in = Definition::kCell;
      built_in.native = Cells::native<Definition>();
      cell = &built_in;
    });
    if (cell != nullptr) return;
    if (!name.starts_with("lltm-cell")) {
      throw wrong("a cell's name or text", safetensors::name_text(name));
    }
    custom = parse_cell(name);
    cell = &custom->info;
    if (const char* const has = unsupported(*cell)) {
      throw wrong(std::string("a cell without ") + has, custom->name);
    }
  }

  double initial(int column) const {
    const int state = column - (cell->reads_h ? 1 : 0);
    return custom == nullptr || state < 0 ? 0 : custom->initial_states[state];
  }

  CellInfo built_in = {};
  std::unique_ptr<const CellText> custom;
  const CellInfo* cell = nullptr;
  Arena arena;
  std::vector<LayerView> layers;
  float* between[2] = {};  // (kChunk, B, H), of a layer and the next
  cpu::RunSmallLayer run = nullptr;
};

namespace {

std::vector<std::byte> read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  const std::streamoff size = file ? static_cast<std::streamoff>(file.tellg()) : -1;
  if (size < 0 || size > kMostBytes) throw std::invalid_argument("cannot be read");
  std::vector<std::byte> bytes(static_cast<std::size_t>(size));
  file.seekg(0);
  if (!file.read(reinterpret_cast<char*>(bytes.data()), size)) {
    throw std::invalid_argument("cannot be read");
  }
  return bytes;
}

// Calls body() and describes its error.
template <typename Body>
auto described(const std::string& file, const Body& body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    throw std::invalid_argument("lltm::realtime: " + file + ": not enough memory");
  } catch (const safetensors::Malformed& error) {
    throw std::invalid_argument(
        "lltm::realtime: " + file + ": expected a file of lltm.realtime.save, got " + error.what());
  } catch (const std::exception& error) {
    throw std::invalid_argument("lltm::realtime: " + file + ": " + error.what());
  }
}

}  // namespace

Layer::Layer(const std::string& path, std::int64_t batch)
    : memory_(described(path, [&] { return std::make_unique<Memory>(read_file(path), batch); })) {
  reset();
}
Layer::Layer(std::span<const std::byte> file, std::int64_t batch)
    : memory_(described("bytes", [&] { return std::make_unique<Memory>(file, batch); })) {
  reset();
}
Layer::Layer(Layer&&) noexcept = default;
Layer& Layer::operator=(Layer&&) noexcept = default;
Layer::~Layer() = default;

std::int64_t Layer::num_layers() const noexcept {
  return static_cast<Size>(memory_->layers.size());
}
std::int64_t Layer::batch_size() const noexcept {
  return memory_->layers[0].batch;
}
std::int64_t Layer::input_size() const noexcept {
  return memory_->layers[0].input;
}
std::int64_t Layer::hidden_size() const noexcept {
  return memory_->layers[0].hidden;
}
std::int64_t Layer::state_size() const noexcept {
  return num_layers() * (1 + memory_->cell->states) * batch_size() * hidden_size();
}
std::size_t Layer::memory_bytes() const noexcept {
  return memory_->arena.bytes();
}

void Layer::process(const float* input, float* output, std::int64_t steps) noexcept {
  const FloatingPointMode mode;
  const auto& layers = memory_->layers;
  const std::size_t last = layers.size() - 1;
  if (last == 0) return memory_->run(layers[0], input, output, steps);
  const LayerView& first = layers[0];
  for (Size t = 0; t < steps; t += kChunk) {
    const Size count = std::min(kChunk, steps - t);
    const float* x = input + t * first.batch * first.input;
    for (std::size_t k = 0; k <= last; ++k) {
      float* const y =
          k == last ? output + t * first.batch * first.hidden : memory_->between[k % 2];
      memory_->run(layers[k], x, y, count);
      x = y;
    }
  }
}

void Layer::reset() noexcept {
  for (const LayerView& view : memory_->layers) {
    std::fill_n(view.h, view.batch * view.hidden, 0.0f);
    const int columns = view.cell->state_columns();
    for (Size row = 0; row < view.batch * columns; ++row) {
      const auto value = static_cast<float>(memory_->initial(static_cast<int>(row % columns)));
      std::fill_n(view.c + row * view.padded, view.padded, value);
    }
  }
}

namespace {

// Calls copy(values of the caller, values of the layer, count) for each row of a state. If h is in
// c, too, both are copied.
template <typename Value, typename Copy>
void for_each_state(const std::vector<LayerView>& layers, Value* state, const Copy& copy) {
  for (const LayerView& view : layers) {
    const CellInfo& cell = *view.cell;
    const int columns = cell.state_columns(), own = cell.reads_h ? 1 : 0;
    for (int s = -1; s < cell.states; ++s) {
      for (Size r = 0; r < view.batch; ++r, state += view.hidden) {
        float* const c = view.c + r * columns * view.padded;
        if (s >= 0) {
          copy(state, c + (own + s) * view.padded, view.hidden);
          continue;
        }
        copy(state, view.h + r * view.hidden, view.hidden);
        if (own == 1) copy(state, c, view.hidden);
      }
    }
  }
}

}  // namespace

void Layer::get_state(float* state) const noexcept {
  for_each_state(memory_->layers, state, [](float* to, const float* from, Size n) {
    std::copy_n(from, n, to);
  });
}

void Layer::set_state(const float* state) noexcept {
  for_each_state(memory_->layers, state, [](const float* from, float* to, Size n) {
    std::copy_n(from, n, to);
  });
}

}  // namespace lltm::realtime

// ---- for other languages --------------------------------------------------------------

struct lltm_realtime {
  lltm::realtime::Layer layer;
};

lltm_realtime* lltm_realtime_load(const char* path, int64_t batch, char* error, size_t error_size) {
  const char* text = "lltm::realtime: expected a path, got NULL";
  try {
    if (path != nullptr) return new lltm_realtime{lltm::realtime::Layer(path, batch)};
    throw std::invalid_argument(text);
  } catch (const std::exception& failure) {
    text = failure.what();
    if (error != nullptr && error_size > 0) {
      const size_t count = std::min(std::strlen(text), error_size - 1);
      std::memcpy(error, text, count);
      error[count] = '\0';
    }
  }
  return nullptr;
}
void lltm_realtime_free(lltm_realtime* layer) {
  delete layer;
}
void lltm_realtime_sizes(const lltm_realtime* layer, int64_t* input_size, int64_t* hidden_size) {
  *input_size = layer->layer.input_size();
  *hidden_size = layer->layer.hidden_size();
}
void lltm_realtime_reset(lltm_realtime* layer) {
  layer->layer.reset();
}
void lltm_realtime_process(lltm_realtime* layer, const float* input, float* output, int64_t steps) {
  layer->layer.process(input, output, steps);
}
