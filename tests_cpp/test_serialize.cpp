// Round trips, files from Python, and errors for all malformed files; fuzz/ extends this.
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

class SerializeDtype : public Serialize, public testing::WithParamInterface<at::ScalarType> {};

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

INSTANTIATE_TEST_SUITE_P(
    Dtypes,
    SerializeDtype,
    testing::ValuesIn(kEveryDtype),
    [](const testing::TestParamInfo<at::ScalarType>& info) { return c10::toString(info.param); });

TEST_P(SerializeDtype, RoundTripKeepsDtypeShapeAndEveryBit) {
  at::manual_seed(1);
  const Tensor bytes = at::randint(
      GetParam() == at::kBool ? 2 : 256,
      {7, 5 * static_cast<int64_t>(c10::elementSize(GetParam()))},
      at::kByte);
  const Tensor elements = bytes.view(GetParam());
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
    EXPECT_EQ(tensor.scalar_type(), GetParam()) << name;
    EXPECT_EQ(tensor.sizes(), tensors.at(name).sizes()) << name;
    EXPECT_TRUE(at::equal(bytes_of(tensor), bytes_of(tensors.at(name)))) << name;
  }
}

TEST_F(Serialize, RoundTripKeepsNoTensors) {
  EXPECT_TRUE(round_trip({}).empty());
}

TEST_F(Serialize, RoundTripKeepsAnyName) {
  const TensorMap tensors = {
      {"", at::full({}, 1)},
      {"0.weights_l0", at::full({}, 2)},
      {"quote \" backslash \\ newline \n", at::full({}, 3)},
      {"größe \xe4\xb8\xad\xf0\x9f\x98\x80", at::full({}, 4)},
      {"zero \0 inside"s, at::full({}, 5)},
  };
  const TensorMap loaded = round_trip(tensors);
  ASSERT_EQ(loaded.size(), tensors.size());
  for (const auto& [name, tensor] : tensors) EXPECT_TRUE(identical(loaded.at(name), tensor));
}

TEST_F(Serialize, RoundTripKeepsTensorsThatRequireGradients) {
  const Tensor tensor = at::ones({2}).requires_grad_();
  const TensorMap loaded = round_trip({{"leaf", tensor}, {"result", tensor * 2}});
  EXPECT_FALSE(loaded.at("leaf").requires_grad());
  EXPECT_TRUE(identical(loaded.at("result"), at::full({2}, 2.0)));
}

// Such as the imaginary part of a conjugate: reads change the sign.
TEST_F(Serialize, RoundTripKeepsLazilyNegatedTensors) {
  const Tensor negated = at::_neg_view(at::ones({2}));
  ASSERT_TRUE(negated.is_neg());
  EXPECT_TRUE(identical(round_trip({{"x", negated}}).at("x"), at::full({2}, -1.0)));
}

TEST_F(Serialize, LoadedTensorsOwnTheirMemory) {
  lltm::save_safetensors({{"x", at::ones({3})}, {"y", at::ones({3})}}, path());
  TensorMap loaded = lltm::load_safetensors(path());
  fs::remove(path());
  loaded.at("x").zero_();
  EXPECT_TRUE(identical(loaded.at("y"), at::ones({3})));
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

TEST_F(Serialize, SavingReplacesTheFileAndLeavesNothingElse) {
  write("what was there before, which is longer than nothing");
  lltm::save_safetensors({{"x", at::ones({2})}}, path());
  EXPECT_TRUE(identical(lltm::load_safetensors(path()).at("x"), at::ones({2})));
  EXPECT_EQ(files(), 1);
}

TEST_F(Serialize, SavingReplacesASymbolicLink) {
  std::ofstream(path("target")) << "what was there before";
  fs::create_symlink("target", path());
  lltm::save_safetensors({{"x", at::ones({2})}}, path());
  EXPECT_FALSE(fs::is_symlink(path()));
  EXPECT_EQ(fs::file_size(path("target")), 21);
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
  const std::string x = "expected tensor \"x\" ",
                    strided = "to have strides and elements, got layout ";
  reject(
      "x",
      at::zeros({2}, at::kComplexDouble),
      kTypeError,
      x + "of a dtype that the format has, got ComplexDouble");
  reject("x", Tensor(), kTypeError, x + "to be defined, got an undefined tensor");
  reject("x", at::zeros({2}).to_sparse(), kRuntimeError, x + strided + "Sparse on device cpu");
  reject("x", at::empty({2}, at::kMeta), kRuntimeError, x + strided + "Strided on device meta");
  reject(
      "__metadata__",
      at::zeros({2}),
      kValueError,
      "expected tensor names, got \"__metadata__\", which the format reserves");
  reject(
      "\xff", at::zeros({2}), kValueError, path() + ": expected names in UTF-8, got other bytes");
  EXPECT_EQ(read(), before);
}

struct MalformedFile {
  std::string name;
  std::string bytes;
  std::string reason;
};
void PrintTo(const MalformedFile& file, std::ostream* stream) {
  *stream << file.name;
}

class Malformed : public Serialize, public testing::WithParamInterface<MalformedFile> {};

std::string one_tensor(const std::string& value) {
  return contents("{\"x\":" + value + "}");
}
// One byte, with this shape or these offsets.
std::string of_shape(const std::string& shape) {
  return contents(header_of("U8", shape, "[0,1]"), "1");
}
std::string of_offsets(const std::string& offsets) {
  return contents(header_of("U8", "[1]", offsets), "1");
}
// Two bytes each; y at these offsets.
std::string two_tensors(const std::string& offsets, const std::string& data) {
  return contents(
      R"({"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
      R"("y":{"dtype":"U8","shape":[2],"data_offsets":)" +
          offsets + "}}",
      data);
}
const std::string kNotATensor = "expected an object in tensor \"x\", got ";
const std::string kNotASize = "expected non-negative integers in tensor \"x\", got ";
const std::string kTooLarge = "expected a shape of less than 2^63 bytes of tensor \"x\", got ";
const std::string kNoPair = "expected data_offsets [begin, end] of tensor \"x\", got ";
const std::string kSaveInPython =
    "save it in Python with safetensors.torch.save_file(module.state_dict(), path)";

std::string no_json(int byte) {
  return "expected a JSON header, got invalid JSON at byte " + std::to_string(byte);
}
std::string not_next(const std::string& tensor, int next, int got) {
  return "expected data_offsets of tensor \"" + tensor + "\" from " + std::to_string(next) +
         ", without gaps or overlaps, got " + std::to_string(got);
}

// clang-format off
const MalformedFile kMalformedFiles[] = {
    // Header length.
    {"FileShorterThanTheLength", "\x02\0\0\0\0\0\0"s,
     "expected a safetensors file, got a file of 7 bytes"},
    {"HeaderLongerThanTheFile", little_endian(3) + "{}",
     "expected a safetensors file, got a file of 10 bytes with a header of 3 bytes"},
    {"LengthThatOverflowsWithItsOwnBytes", little_endian(UINT64_MAX - 7) + "{}",
     "expected a safetensors file, got a file of 10 bytes with a header of 18446744073709551608 bytes"},

    // Headers that are no JSON object.
    {"HeaderThatIsNoObject", contents("[]"),
     "expected an object as header, got a JSON array"},
    // A parser that stops at a null character would read only {}.
    {"SomethingHiddenBehindAZero", contents("{}\0{\"x\":1}"s),
     "expected a JSON header, got a zero at byte 2"},
    {"TensorThatDoesNotEnd", contents(R"({"x":{})"), no_json(8)},
    {"Comment", contents("{/**/}"), no_json(2)},
    {"NameThatIsNotUtf8", contents("{\"\xff\":{}}"), no_json(3)},

    // Rejected before it uses memory.
    {"DeepArrays", one_tensor(repeated(1'000'000, "[")),
     "expected at most 64 dimensions of tensor \"x\", got more"},
    {"DeepObjects", one_tensor(repeated(100'000, "{\"shape\":")),
     "expected at most 128 levels in tensor \"x\", got more"},

    {"TensorOfANumber", one_tensor("1"), kNotATensor + "1"},
    {"TwoTensorsOfOneName",
     contents(R"({"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},)"
              R"("x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})"),
     "expected different names in the header, got \"x\" twice"},
    {"TwoFieldsOfOneName",
     one_tensor(R"({"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]})"),
     "expected different names in tensor \"x\", got \"dtype\" twice"},
    {"NoDtype", one_tensor(R"({"shape":[0],"data_offsets":[0,0]})"),
     "expected dtype in tensor \"x\", got none"},
    {"DtypeThatIsNoText", one_tensor(R"({"dtype":32,"shape":[0],"data_offsets":[0,0]})"),
     "expected a string as dtype in tensor \"x\", got 32"},

    {"ShapeThatIsNoArray", contents(header_of("U8", "3", "[0,3]"), "123"),
     "expected an array as shape in tensor \"x\", got 3"},
    {"SizeBelowZero", of_shape("[-1]"), kNotASize + "-1"},
    {"SizeOf2ToThe64", of_shape("[18446744073709551616]"),
     kNotASize + "1.8446744073709552e+19"},
    {"SizeAboveTheLargestNumber", of_shape("[9223372036854775808]"),
     kTooLarge + "(9223372036854775808,)"},
    {"NumberOutOfRange", of_shape("[1e400]"),
     "expected a JSON header, got a number out of range"},
    // In 64 bits, 2^32 * 2^32 and 4 * 2^62 are 0, and 4 * 2^61 is negative. The last shape is empty
    // but has a stride of 2^64.
    {"ShapeWhoseProductIsZero", contents(header_of("F32", "[4294967296,4294967296]", "[0,0]")),
     kTooLarge + "(4294967296, 4294967296)"},
    {"ShapeWhoseBytesAreZero", contents(header_of("F32", "[4611686018427387904]", "[0,0]")),
     kTooLarge + "(4611686018427387904,)"},
    {"ShapeWhoseBytesAreNegative", contents(header_of("F32", "[2305843009213693952]", "[0,0]")),
     kTooLarge + "(2305843009213693952,)"},
    {"ShapeWhoseStridesOverflow", contents(header_of("F32", "[0,4294967296,4294967296]", "[0,0]")),
     kTooLarge + "(0, 4294967296, 4294967296)"},
    {"ShapeOfManyDimensions", of_shape("[1" + repeated(64, ",1") + "]"),
     "expected at most 64 dimensions of tensor \"x\", got more"},
    // Allocates nothing that exceeds the file.
    {"ShapeOfMoreThanTheFile",
     contents(header_of("F64", "[1099511627776]", "[0,8796093022208]"), "12345678"),
     "expected 8796093022208 bytes after the header, got 8"},
    {"ShapeOfMoreThanTheOffsets", contents(header_of("F32", "[2]", "[0,4]"), "1234"),
     "expected 8 bytes of tensor \"x\", F32 of shape (2,), got data_offsets of 4"},
    {"ScalarWithoutBytes", contents(header_of("F32", "[]", "[0,0]")),
     "expected 4 bytes of tensor \"x\", F32 of shape (), got data_offsets of 0"},

    {"OneOffset", of_offsets("[0]"), "expected two data_offsets in tensor \"x\", got 1"},
    {"OffsetsThatEndBeforeTheyBegin", of_offsets("[1,0]"), kNoPair + "[1, 0]"},
    {"TensorsThatOverlap", two_tensors("[1,3]", "123"), not_next("y", 2, 1)},
    {"BytesAfterTheLastTensor", two_tensors("[2,4]", "12345"),
     "expected 4 bytes after the header, got 5"},
    {"EmptyTensorOutsideTheData", contents(header_of("U8", "[0]", "[7,7]")), not_next("x", 0, 7)},

    {"MetadataThatIsNoObject", contents(R"({"__metadata__":"text"})"),
     "expected an object as __metadata__, got a JSON string"},
    {"MetadataOfANumber", contents(R"({"__metadata__":{"a":1}})"),
     "expected strings in __metadata__, got 1"},

    // Elements, and names in messages.
    {"BoolThatIsNeitherTrueNorFalse", contents(header_of("BOOL", "[3]", "[0,3]"), "\0\1\2"s),
     "expected bytes of 0 and 1 in BOOL tensor \"x\", got 2"},
    {"LongAndUnprintableName", contents("{\"\\u001b" + std::string(1000, 'n') + "\":1}"),
     "expected an object in tensor \"\\u001b" + std::string(79, 'n') + "...\", got 1"},
    // U+009B is a one-character ESC [. U+00A0 and later are text.
    {"NameWithControlCharactersAboveAscii",
     contents("{\"\x7f\xc2\x80\xc2\x9b" "31m\xc2\x9f\xc2\xa0\xc3\xb6\":1}"),
     "expected an object in tensor \"\\u007f\\u0080\\u009b31m\\u009f\xc2\xa0\xc3\xb6\", "
     "got 1"},

    // Output of torch.save.
    {"ZipArchiveOfTorchSave", "PK\x03\x04\x00\x00\x08\x08\x00\x00\x00\x00\x00\x00"s,
     "expected a safetensors file, got a zip archive as torch.save writes it; " + kSaveInPython},
    {"PickleOfTorchSave", "\x80\x02\x8a\nl\xfc\x9c\x46\xf9 j\xa8P\x19."s,
     "expected a safetensors file, got a pickle as torch.save writes it; " + kSaveInPython},
};
// clang-format on

INSTANTIATE_TEST_SUITE_P(
    Files,
    Malformed,
    testing::ValuesIn(kMalformedFiles),
    [](const testing::TestParamInfo<MalformedFile>& info) { return info.param.name; });

TEST_P(Malformed, IsRejected) {
  write(GetParam().bytes);
  expect_load_error(path(), kValueError, path() + ": " + GetParam().reason);
}

TEST_F(Serialize, AHeaderLongerThanTheLimitIsRejected) {
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

TEST_F(StateDict, LoadingKeepsTheTensorsOfParameters) {
  lltm::LLTM layer = layer_of(1);
  const Tensors before = layer->parameters();
  std::vector<const void*> memory;
  for (const Tensor& tensor : before) {
    memory.push_back(tensor.const_data_ptr());
  }
  lltm::save_state_dict(*layer_of(0), path());
  lltm::load_state_dict(*layer, path());
  const Tensors after = layer->parameters();
  for (size_t k = 0; k < before.size(); ++k) {
    EXPECT_TRUE(after[k].is_same(before[k]));
    EXPECT_EQ(after[k].const_data_ptr(), memory[k]);
    EXPECT_TRUE(after[k].requires_grad());
    EXPECT_TRUE(after[k].is_leaf());
  }
  EXPECT_TRUE(identical(
      std::get<0>(layer->forward(at::ones({2, 1, 3}))),
      std::get<0>(layer_of(0)->forward(at::ones({2, 1, 3})))));
}

TEST_F(StateDict, ConvertsToTheDtypeOfTheModule) {
  lltm::LLTM saved = layer_of(0);
  lltm::LLTM loaded = layer_of(1);
  loaded->to(at::kDouble);
  lltm::save_state_dict(*saved, path());
  lltm::load_state_dict(*loaded, path());
  EXPECT_EQ(loaded->parameters()[0].scalar_type(), at::kDouble);
  saved->to(at::kDouble);
  EXPECT_TRUE(identical(values(*loaded), values(*saved)));
}

TEST_F(StateDict, AcceptsABiasSavedAsARow) {
  const Tensor weights = at::arange(15 * 8, at::kFloat).view({15, 8});
  const Tensor bias = at::arange(15, at::kFloat);
  lltm::save_safetensors({{"weights", weights}, {"bias", bias.view({1, 15})}}, path());
  lltm::LLTMCell cell(3, 5);
  lltm::load_state_dict(*cell, path());
  EXPECT_TRUE(identical(cell->weights, weights));
  EXPECT_TRUE(identical(cell->bias, bias));
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

// Only a bias may be saved as a row; matrix shapes must match.
TEST_F(StateDict, RejectsOtherShapesOfTheSameSize) {
  lltm::LLTMCell cell(3, 5);
  const Tensors before = values(*cell);
  for (const std::vector<int64_t>& shape :
       std::vector<std::vector<int64_t>>{{15, 1}, {1, 1, 15}, {3, 5}, {1, 14}, {}}) {
    lltm::save_safetensors({{"weights", at::zeros({15, 8})}, {"bias", at::zeros(shape)}}, path());
    EXPECT_THROW(lltm::load_state_dict(*cell, path()), c10::ValueError) << at::IntArrayRef(shape);
  }
  lltm::save_safetensors({{"weights", at::zeros({8, 15})}, {"bias", at::zeros({15})}}, path());
  EXPECT_THROW(lltm::load_state_dict(*cell, path()), c10::ValueError);
  EXPECT_TRUE(identical(values(*cell), before));
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
