// TF32 on the CPU: float32 with ten bits after the first, of which tensor cores multiply.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace lltm_test {

// The nearest, ties away from zero, as cvt.rna.tf32.f32 rounds.
inline float to_tf32(float value) {
  if (std::isnan(value)) return std::bit_cast<float>(0x7FFFE000u);
  return std::bit_cast<float>((std::bit_cast<std::uint32_t>(value) + 0x1000u) & ~0x1FFFu);
}

inline bool is_tf32(float value) {
  return (std::bit_cast<std::uint32_t>(value) & 0x1FFFu) == 0;
}

}  // namespace lltm_test
