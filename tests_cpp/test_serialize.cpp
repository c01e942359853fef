// Round trips, files from Python, and errors. fuzz/ damages files at random.
#include "testing.h"

#include <lltm/nn.h>
#include <lltm/serialize.h>

#include <ATen/ATen.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <typeinfo>

namespace lltm_test {
namespace {

namespace fs = std::filesystem;
using namespace std::string_literals;  // text with null characters

using at::Tensor;
using TensorMap = std::map<std::string, Tensor>;

std::string little_endian(uint64_t value) {
  std::string bytes;
  for (int k = 0; k < 8; ++k) {
    bytes.push_back(static_cast<char>(value >> (8 * k) & 0xff));
  }
  return bytes;
}

std::string contents(const std::string& header, const std::string& data = "") {
  return little_endian(header.size()) + header + data;
}

std::string header_of(
    const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"x":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets +
         "}}";
}

std::string repeated(int64_t times, const std::string& text) {
  std::string result;
  for (int64_t k = 0; k < times; ++k) result += text;
  return result;
}

class Serialize : public TemporaryFolder {
 protected:
  std::string path(const std::string& name = "file.safetensors") const {
    return TemporaryFolder::path(name);
  }

  // May wait for the disk.
  std::string write(const std::string& bytes) const {
    fs::remove(path());
    std::ofstream(path(), std::ios::binary) << bytes;
    return path();
  }

  std::string read() const {
    std::ifstream file(path(), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }

  auto files() const { return std::distance(fs::directory_iterator(path("")), {}); }

  TensorMap round_trip(const TensorMap& tensors) const {
    lltm::save_safetensors(tensors, path());
    return lltm::load_safetensors(path());
  }

  static void expect_save_error(const std::string& to, const std::string& reason) {
    expect_error(
        [&] { lltm::save_safetensors({{"x", at::ones({2})}}, to); },
        kRuntimeError,
        "lltm::save_safetensors: cannot write " + to + ": " + reason);
  }
  static void expect_load_error(
      const std::string& from, const std::type_info& error, const std::string& reason) {
    expect_error([&] { lltm::load_safetensors(from); }, error, "lltm::load_safetensors: " + reason);
  }
};

class StateDict : public Serialize {
 protected:
  void expect_misfit(torch::nn::Module& module, const std::string& differences) const {
    expect_error(
        [&] { lltm::load_state_dict(module, path()); },
        kValueError,
        "lltm::load_state_dict: " + path() + " does not fit module " + module.name() + ":" +
            differences);
  }
};

constexpr at::ScalarType kEveryDtype[] = {
    at::kDouble,         at::kFloat,
    at::kHalf,           at::kBFloat16,
    at::kLong,           at::kInt,
    at::kShort,          at::kChar,
    at::kByte,           at::kBool,
    at::kFloat8_e4m3fn,  at::kFloat8_e4m3fnuz,
    at::kFloat8_e5m2,    at::kFloat8_e5m2fnuz,
    at::kFloat8_e8m0fnu, at::kComplexFloat,
    at::kUInt64,         at::kUInt32,
    at::kUInt16,
};

TEST_F(Serialize, RoundTripKeepsDtypeShapeAndEveryBit) {
  for (const at::ScalarType dtype : kEveryDtype) {
    SCOPED_TRACE(dtype);
    at::manual_seed(1);
    const int64_t columns = 5 * static_cast<int64_t>(c10::elementSize(dtype));
    const Tensor bytes = at::randint(dtype == at::kBool ? 2 : 256, {7, columns}, at::kByte);
    const Tensor elements = bytes.view(dtype);
    const TensorMap tensors = {
        {"matrix", elements},
        {"transposed", elements.t()},
        {"every other", elements.slice(1, 0, std::nullopt, 2)},
        {"expanded", elements[0].expand({3, 5})},
        {"offset", elements.flatten().slice(0, 3, 10)},
        {"scalar", elements[0][0]},
        {"empty", elements.narrow(0, 0, 0)},
    };
    const TensorMap loaded = round_trip(tensors);
    ASSERT_EQ(loaded.size(), tensors.size());
    // Compares bytes: random values may be NaN.
    const auto bytes_of = [](const Tensor& x) { return x.contiguous().flatten().view(at::kByte); };
    for (const auto& [name, tensor] : loaded) {
      EXPECT_EQ(tensor.scalar_type(), dtype) << name;
      EXPECT_EQ(tensor.sizes(), tensors.at(name).sizes()) << name;
      EXPECT_TRUE(at::equal(bytes_of(tensor), bytes_of(tensors.at(name)))) << name;
    }
  }
}

TEST_F(Serialize, RoundTripKeepsNamesAndValues) {
  EXPECT_TRUE(round_trip({}).empty());
  const Tensor leaf = at::full({}, 2.0).requires_grad_();
  const TensorMap tensors = {
      {"", at::full({}, 1)},
      {"0.weights_l0", leaf},
      {"quote \" backslash \\ newline \n", leaf * 2},
      {"größe \xe4\xb8\xad\xf0\x9f\x98\x80", at::full({}, 4)},
      // Such as the imaginary part of a conjugate: reads change the sign.
      {"zero \0 inside"s, at::_neg_view(at::full({}, 5.0))},
  };
  const TensorMap loaded = round_trip(tensors);
  ASSERT_EQ(loaded.size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    EXPECT_TRUE(identical(loaded.at(name), tensor.detach().clone().resolve_neg())) << name;
    EXPECT_FALSE(loaded.at(name).requires_grad()) << name;
  }
}

TEST_F(Serialize, WritesTheFormat) {
  lltm::save_safetensors(
      {{"a", at::tensor({1, 2, 3}, at::kByte)},
       {"b", at::tensor({1.0, -2.0}, at::kDouble).view({2, 1})},
       {"c", at::tensor({1.5F}, at::kFloat)}},
      path());
  // Largest elements first, and spaces pad the header to eight bytes: every element is aligned.
  std::string header = R"({"__metadata__":{"format":"pt"},)"
                       R"("b":{"dtype":"F64","shape":[2,1],"data_offsets":[0,16]},)"
                       R"("c":{"dtype":"F32","shape":[1],"data_offsets":[16,20]},)"
                       R"("a":{"dtype":"U8","shape":[3],"data_offsets":[20,23]}})";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  EXPECT_EQ(
      read(),
      contents(
          header,
          "\x00\x00\x00\x00\x00\x00\xf0\x3f"
          "\x00\x00\x00\x00\x00\x00\x00\xc0"
          "\x00\x00\xc0\x3f"
          "\x01\x02\x03"s));
}

// As safetensors in Python: any order, escapes, white space, metadata, and further fields.
TEST_F(Serialize, ReadsEveryFormOfAHeader) {
  const std::string b = R"( "b" : {"data_offsets":[1,3], "shape":[2], "dtype":"U8")";
  const std::string a = R"(},
	"\u0061": {"shape":[ ],"dtype":"\u00558","data_offsets":[0,1]})";
  for (const std::string& header :
       {"{" + b + a + "}",
        "\n\t {" + b + a + "}\t\r\n ",
        "{" + b + R"(,"strides":[[1],{"x":null}],"":[)" + repeated(100, "[1,") + "1" +
            repeated(100, "]") + "]" + a + "}",
        R"({"__metadata__":null,)" + b + a + "}",
        R"({"__metadata__":{"key":"dtype","dtype":""},)" + b + a + "}"}) {
    SCOPED_TRACE(header);
    write(contents(header, "\x01\x02\x03"));
    const TensorMap loaded = lltm::load_safetensors(path());
    ASSERT_EQ(loaded.size(), 2);
    EXPECT_TRUE(identical(loaded.at("a"), at::scalar_tensor(1, at::kByte)));
    EXPECT_TRUE(identical(loaded.at("b"), at::tensor({2, 3}, at::kByte)));
  }
}

TEST_F(Serialize, SavingReplacesAFileOrSymbolicLink) {
  const TensorMap tensors = {{"x", at::ones({2})}};
  write("what was there before, which is longer than nothing");
  EXPECT_TRUE(identical(round_trip(tensors).at("x"), at::ones({2})));
  EXPECT_EQ(files(), 1);
  fs::rename(path(), path("target"));
  fs::create_symlink("target", path());
  round_trip({});
  EXPECT_FALSE(fs::is_symlink(path()));
  EXPECT_TRUE(identical(lltm::load_safetensors(path("target")).at("x"), at::ones({2})));
  EXPECT_EQ(files(), 2);
}

TEST_F(Serialize, OnlyRegularFilesAreWritten) {
  fs::create_directory(path("folder"));
  ASSERT_EQ(mkfifo(path("fifo").c_str(), S_IRUSR | S_IWUSR), 0);
  expect_save_error(path("folder"), "it is not a regular file");
  expect_save_error(path("fifo"), "it is not a regular file");
  expect_save_error(path("none/file"), "No such file or directory");
  EXPECT_TRUE(fs::is_fifo(path("fifo")));
  EXPECT_EQ(files(), 2);
}

TEST_F(Serialize, OnlyRegularFilesAreRead) {
  const std::string start = "cannot read " + path("");
  expect_load_error(path("none"), kRuntimeError, start + "none: No such file or directory");
  expect_load_error(path(""), kRuntimeError, start + ": it is not a regular file");
}

// The file size is limited. A large tensor is partly written, a small tensor not at all.
TEST_F(Serialize, FileIsUnchangedIfTheDiskIsFull) {
  const std::string before = "what was there before";
  write(before);
  rlimit unlimited = {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &unlimited), 0);
  for (const int64_t elements : {1 << 16, 2}) {
    SCOPED_TRACE(elements);
    const auto handler = std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit = {static_cast<rlim_t>(elements), unlimited.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
    std::string error;
    try {
      lltm::save_safetensors({{"x", at::ones({elements})}}, path());
    } catch (const c10::Error& caught) {
      error = caught.what_without_backtrace();
    }
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &unlimited), 0);
    std::signal(SIGXFSZ, handler);
    EXPECT_EQ(error, "lltm::save_safetensors: cannot write " + path() + ": File too large");
    EXPECT_EQ(read(), before);
    EXPECT_EQ(files(), 1);
  }
}

TEST_F(Serialize, SavingRejectsTensorsThatTheFormatDoesNotSupport) {
  const std::string before = "what was there before";
  write(before);
  const auto reject = [&](const std::string& name,
                          const Tensor& tensor,
                          const std::type_info& error,
                          const std::string& text) {
    expect_error(
        [&] { lltm::save_safetensors({{name, tensor}}, path()); },
        error,
        "lltm::save_safetensors: " + text);
  };
  const std::string x = "expected tensor \"x\" ";
  reject(
      "x",
      at::zeros({2}, at::kComplexDouble),
      kTypeError,
      x + "of a dtype that the format has, got ComplexDouble");
  reject("x", Tensor(), kTypeError, x + "to be a tensor, got an undefined tensor");
  reject("x", at::zeros({2}).to_sparse(), kRuntimeError, x + "of layout Strided, got Sparse");
  reject("x", at::empty({2}, at::kMeta), kRuntimeError, x + "with elements, got a meta tensor");
  reject(
      "__metadata__",
      at::zeros({2}),
      kValueError,
      "expected tensor names, got \"__metadata__\", which the format reserves");
  reject(
      "\xff", at::zeros({2}), kValueError, path() + ": expected names in UTF-8, got other bytes");
  EXPECT_EQ(read(), before);
}

TEST_F(Serialize, MalformedFilesAreRejected) {
  const auto tensor = [](const std::string& value) { return contents("{\"x\":" + value + "}"); };
  const auto of_shape = [](const std::string& dtype, const std::string& shape) {
    return contents(header_of(dtype, shape, "[0,0]"));
  };
  const auto of_offsets = [](const std::string& offsets, const std::string& data) {
    return contents(header_of("U8", "[1]", offsets), data);
  };
  const std::string fields = R"("dtype":"U8","shape":[0],"data_offsets":[0,0])";
  const std::string no_object = "a header that is not a JSON object";
  const std::string invalid = "a header with an invalid entry \"x\"";
  const std::string other_shape = "tensor \"x\" with data_offsets that do not match its shape";
  const std::string not_covered = "data_offsets with a gap or overlap before tensor \"x\"";
  const std::string torch_save =
      "a file as torch.save writes it; save it in Python with "
      "safetensors.torch.save_file(module.state_dict(), path)";
  const std::vector<std::pair<std::string, std::string>> table = {
      {"\x02\0\0\0\0\0\0"s, "a file of 7 bytes with a header of 2 bytes"},
      {little_endian(3) + "{}", "a file of 10 bytes with a header of 3 bytes"},
      {little_endian(UINT64_MAX - 7) + "{}",  // overflows with its own bytes
       "a file of 10 bytes with a header of 18446744073709551608 bytes"},
      {"PK\x03\x04\x00\x00\x08\x08\x00\x00\x00\x00\x00\x00"s, torch_save},  // a zip archive
      {"\x80\x02\x8a\nl\xfc\x9c\x46\xf9 j\xa8P\x19."s, torch_save},         // a pickle
      {contents("[]"), no_object},
      {contents("{}\0{\"x\":1}"s), no_object},  // hidden from a parser that stops at a zero
      {contents("{\"\xff\":{}}"), no_object},
      {tensor(repeated(1'000'000, "[")), "a header of too many levels"},
      {contents("{\"x\":{" + fields + "},\"x\":{" + fields + "}}"), "a header with \"x\" twice"},
      {tensor("{\"dtype\":\"I8\"," + fields + "}"), "a header with \"dtype\" twice"},
      {tensor("1"), invalid},
      {tensor(R"({"shape":[0],"data_offsets":[0,0]})"), invalid},
      {of_shape("U8", "[-1]"), invalid},
      {of_offsets("[0]", ""), invalid},
      {of_offsets("[1,0]", "1"), invalid},
      {contents(R"({"__metadata__":{"a":1}})"), "a header with an invalid entry \"__metadata__\""},
      {contents("{\"\\u001b\xc2\x9b" + std::string(1000, 'n') + "\":1}"),
       "a header with an invalid entry \"\\u001b\\u009b" + std::string(77, 'n') + "...\""},
      {of_offsets("[1,2]", "12"), not_covered},
      {of_offsets("[0,1]", "12"), "tensors of 1 bytes, but 2 bytes after the header"},
      {of_offsets("[0,2]", "12"), other_shape},
      // In 64 bits, 2^32 * 2^32 is 0. The second shape has a stride of 2^64.
      {of_shape("F32", "[4294967296,4294967296]"), other_shape},
      {of_shape("F32", "[0,4294967296,4294967296]"), other_shape},
      {of_shape("U8", "[0" + repeated(64, ",1") + "]"), other_shape},
      {contents(header_of("BOOL", "[3]", "[0,3]"), "\0\1\2"s),
       "BOOL tensor \"x\" with bytes other than 0 and 1"},
  };
  for (const auto& [bytes, got] : table) {
    write(bytes);
    expect_load_error(path(), kValueError, path() + ": expected a safetensors file, got " + got);
  }
  write(little_endian(100'000'001));
  fs::resize_file(path(), 200'000'000);  // sparse file
  expect_load_error(
      path(),
      kValueError,
      path() +
          ": expected a safetensors file, got a file of 200000000 bytes with a header of 100000001 "
          "bytes");
}

lltm::LLTM layer_of(uint64_t seed) {
  torch::manual_seed(seed);
  return lltm::LLTM(lltm::LLTMOptions(3, 5).num_layers(2).bidirectional(true));
}

Tensors values(const torch::nn::Module& module) {
  Tensors result;
  for (const Tensor& tensor : module.parameters()) {
    result.push_back(tensor.detach().clone());
  }
  for (const Tensor& tensor : module.buffers()) {
    result.push_back(tensor.clone());
  }
  return result;
}

TEST_F(StateDict, AcceptsHoldersAndPointers) {
  lltm::LLTM saved = layer_of(0);
  lltm::LLTM loaded = layer_of(1);
  lltm::save_state_dict(saved, path());
  lltm::load_state_dict(loaded, path());
  EXPECT_TRUE(identical(values(*loaded), values(*saved)));

  const std::shared_ptr<torch::nn::Module> pointer = layer_of(2).ptr();
  lltm::save_state_dict(pointer, path());
  lltm::load_state_dict(loaded, path());
  EXPECT_TRUE(identical(values(*loaded), values(*pointer)));
  lltm::load_state_dict(pointer, path());
}

TEST_F(StateDict, LoadingKeepsTheTensorsOfParametersAndTheirDtype) {
  lltm::LLTM saved = layer_of(0);
  lltm::LLTM loaded = layer_of(1);
  loaded->to(at::kDouble);
  const Tensors before = loaded->parameters();
  std::vector<const void*> memory;
  for (const Tensor& tensor : before) memory.push_back(tensor.const_data_ptr());
  lltm::save_state_dict(*saved, path());
  lltm::load_state_dict(*loaded, path());
  const Tensors after = loaded->parameters();
  for (size_t k = 0; k < before.size(); ++k) {
    EXPECT_TRUE(after[k].is_same(before[k]));
    EXPECT_EQ(after[k].const_data_ptr(), memory[k]);
    EXPECT_TRUE(after[k].requires_grad());
    EXPECT_TRUE(after[k].is_leaf());
  }
  saved->to(at::kDouble);
  EXPECT_TRUE(identical(values(*loaded), values(*saved)));
}

TEST_F(StateDict, ContainsBuffersAndNestedModules) {
  const auto make = [](uint64_t seed) {
    torch::manual_seed(seed);
    return torch::nn::Sequential(
        torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4), lltm::LLTMCell(4, 5));
  };
  torch::nn::Sequential saved = make(0);
  saved->children()[1]->as<torch::nn::BatchNorm1d>()->forward(at::rand({6, 4}));
  torch::nn::Sequential loaded = make(1);
  lltm::save_state_dict(*saved, path());
  const TensorMap file = lltm::load_safetensors(path());
  for (const char* name :
       {"0.weight", "0.bias", "1.running_mean", "1.num_batches_tracked", "2.weights", "2.bias"}) {
    EXPECT_EQ(file.count(name), 1) << name;
  }
  EXPECT_EQ(file.at("1.num_batches_tracked").item<int64_t>(), 1);
  lltm::load_state_dict(*loaded, path());
  EXPECT_TRUE(identical(values(*loaded), values(*saved)));
}

TEST_F(StateDict, OnlyRequiredTensorsNeedADtypeOfPyTorch) {
  torch::nn::Linear linear(torch::nn::LinearOptions(2, 1).bias(false));
  const auto write_with = [&](const std::string& dtype) {
    write(contents(
        R"({"weight":{"dtype":")" + dtype + R"(","shape":[1,2],"data_offsets":[3,11]},)" +
            R"("x":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}})",
        std::string(11, '\0')));
  };
  write_with("F32");
  lltm::load_state_dict(*linear, path());
  EXPECT_TRUE(identical(linear->weight.detach(), at::zeros({1, 2})));
  EXPECT_EQ(lltm::load_safetensors(path()).size(), 1);
  write_with("F32_NEW");
  expect_misfit(*linear, "\n  expected \"weight\" of shape (1, 2), got a dtype that PyTorch lacks");
}

TEST_F(StateDict, NamesEveryDifferenceAndChangesNothing) {
  lltm::LLTMCell cell(3, 5);
  const Tensors before = values(*cell);
  lltm::save_safetensors(
      {{"bias", at::zeros({15})}, {"weight", at::zeros({15, 8})}, {"weights", at::zeros({15, 9})}},
      path());
  expect_misfit(
      *cell,
      "\n  expected \"weights\" of shape (15, 8), got (15, 9)"
      "\n  expected no \"weight\", got shape (15, 8)");
  lltm::save_safetensors({{"weights", at::zeros({15, 8})}}, path());
  EXPECT_EQ(cell->name(), "lltm::LLTMCellImpl");
  expect_misfit(*cell, "\n  expected \"bias\" of shape (15,), got nothing");
  EXPECT_TRUE(identical(values(*cell), before));
}

TEST_F(StateDict, NamesTheFirstOfManyDifferences) {
  TensorMap tensors;
  for (int k = 0; k < 100; ++k) {
    tensors["unknown" + std::to_string(k)] = at::zeros({});
  }
  lltm::save_safetensors(tensors, path());
  lltm::LLTMCell cell(3, 5);
  try {
    lltm::load_state_dict(*cell, path());
    ADD_FAILURE() << "nothing was thrown";
  } catch (const c10::ValueError& error) {
    const std::string text = error.what_without_backtrace();
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 21) << text;
    EXPECT_TRUE(text.ends_with("\n  and more")) << text;
  }
}

TEST_F(StateDict, OnlyABiasMayBeSavedAsARow) {
  lltm::LLTMCell cell(3, 5);
  const Tensor weights = at::arange(15 * 8, at::kFloat).view({15, 8});
  const Tensor bias = at::arange(15, at::kFloat);
  lltm::save_safetensors({{"weights", weights}, {"bias", bias.view({1, 15})}}, path());
  lltm::load_state_dict(*cell, path());
  for (const std::vector<int64_t>& shape :
       std::vector<std::vector<int64_t>>{{15, 1}, {1, 1, 15}, {3, 5}, {1, 14}, {}}) {
    lltm::save_safetensors({{"weights", at::zeros({15, 8})}, {"bias", at::zeros(shape)}}, path());
    EXPECT_THROW(lltm::load_state_dict(*cell, path()), c10::ValueError) << at::IntArrayRef(shape);
  }
  lltm::save_safetensors({{"weights", at::zeros({8, 15})}, {"bias", at::zeros({15})}}, path());
  EXPECT_THROW(lltm::load_state_dict(*cell, path()), c10::ValueError);
  EXPECT_TRUE(identical(values(*cell), Tensors{weights, bias}));
}

// Copies to the meta device would silently do nothing.
TEST_F(StateDict, RejectsAModuleOnTheMetaDevice) {
  class Planned : public torch::nn::Module {
   public:
    Planned() : torch::nn::Module("Planned") {
      register_parameter("weights", at::empty({15, 8}, at::kMeta));
    }
  };
  Planned module;
  lltm::save_safetensors({{"weights", at::zeros({15, 8})}}, path());
  expect_misfit(module, "\n  expected \"weights\" on a device with memory, got meta");
}

}  // namespace
}  // namespace lltm_test
