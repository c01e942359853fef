// Plays a sound through a model of train.py, as an audio plugin would: in blocks of 64 samples,
// without PyTorch. Prints the load, the part of real time that the computation takes.
//
//     filter amplifier dry.wav wet.wav
#include <lltm/realtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path + ": cannot be read");
  return {std::istreambuf_iterator<char>(file), {}};
}

// A WAV file of 16 bits, mono. Its header is kept for the output.
struct Sound {
  explicit Sound(const std::string& path) : bytes(read_file(path)) {
    const auto number = [&](std::size_t at, int size) {
      std::uint32_t value = 0;
      std::memcpy(&value, bytes.data() + at, size);
      return value;
    };
    std::size_t at = 12;
    while (at + 8 <= bytes.size()) {
      const std::string name = bytes.substr(at, 4);
      const std::size_t size = std::min<std::size_t>(number(at + 4, 4), bytes.size() - at - 8);
      if (name == "fmt " && size >= 16) {
        mono_16 = number(at + 10, 2) == 1 && number(at + 22, 2) == 16;
        rate = number(at + 12, 4);
      }
      if (name == "data") {
        begin = at + 8;
        samples.resize(size / 2);
        for (std::size_t k = 0; k < samples.size(); ++k) {
          samples[k] =
              static_cast<float>(static_cast<std::int16_t>(number(begin + 2 * k, 2))) / 32768;
        }
      }
      at += 8 + size + size % 2;
    }
    if (!mono_16 || samples.empty()) {
      throw std::runtime_error(path + ": expected a WAV file of 16 bits with one channel");
    }
  }

  void write(const std::string& path) {
    for (std::size_t k = 0; k < samples.size(); ++k) {
      const auto sample =
          static_cast<std::int16_t>(std::lround(32767 * std::clamp(samples[k], -1.0f, 1.0f)));
      std::memcpy(bytes.data() + begin + 2 * k, &sample, sizeof(sample));
    }
    std::ofstream(path, std::ios::binary) << bytes;
  }

  std::string bytes;
  std::size_t begin = 0;
  bool mono_16 = false;
  std::uint32_t rate = 1;
  std::vector<float> samples;
};

// What runs in the audio thread.
class Amplifier {
 public:
  static constexpr std::int64_t kBlock = 64;

  explicit Amplifier(const std::string& name) : lstm_(name + ".rt") {
    const std::string head = read_file(name + ".head");
    head_.resize(lstm_.hidden_size() + 1);
    if (head.size() != 4 * head_.size() || lstm_.input_size() != 1) {
      throw std::runtime_error(name + ": expected files of train.py");
    }
    std::memcpy(head_.data(), head.data(), head.size());
    h_.resize(kBlock * lstm_.hidden_size());
  }

  // At most kBlock samples, in place.
  void process(float* samples, std::int64_t count) noexcept {
    const std::int64_t hidden = lstm_.hidden_size();
    lstm_.process(samples, h_.data(), count);
    for (std::int64_t k = 0; k < count; ++k) {
      float sum = head_[hidden];
      for (std::int64_t j = 0; j < hidden; ++j) sum += head_[j] * h_[k * hidden + j];
      samples[k] += sum;
    }
  }

 private:
  lltm::realtime::Layer lstm_;
  std::vector<float> head_, h_;
};

void filter(const std::string& name, const std::string& from, const std::string& to) {
  Amplifier amplifier(name);
  Sound sound(from);
  const auto count = static_cast<std::int64_t>(sound.samples.size());
  Clock::duration most{}, total{};
  for (std::int64_t k = 0; k < count; k += Amplifier::kBlock) {
    const auto begin = Clock::now();
    amplifier.process(sound.samples.data() + k, std::min(Amplifier::kBlock, count - k));
    const auto taken = Clock::now() - begin;
    total += taken;
    most = std::max(most, taken);
  }
  sound.write(to);
  const double second = std::chrono::duration<double>(total).count();
  const double slowest = std::chrono::duration<double>(most).count();
  std::printf(
      "load %.2f %% of real time, slowest block %.2f %%\n",
      100 * second * sound.rate / static_cast<double>(count),
      100 * slowest * sound.rate / Amplifier::kBlock);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fputs("usage: filter MODEL DRY.wav WET.wav\n", stderr);
    return 2;
  }
  try {
    filter(argv[1], argv[2], argv[3]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
