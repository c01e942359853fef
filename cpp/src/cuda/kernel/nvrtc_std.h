// Replaces <cstdint>, <type_traits>, <utility> and some GCC functions: NVRTC has no standard
// library.
#ifndef LLTM_NVRTC_STD
#define LLTM_NVRTC_STD

namespace std {

using int32_t = int;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
using uintptr_t = unsigned long long;

template <bool kCondition, typename T, typename Other>
struct conditional {
  using type = T;
};
template <typename T, typename Other>
struct conditional<false, T, Other> {
  using type = Other;
};
template <bool kCondition, typename T, typename Other>
using conditional_t = typename conditional<kCondition, T, Other>::type;

template <typename T, typename Other>
inline constexpr bool is_same_v = false;
template <typename T>
inline constexpr bool is_same_v<T, T> = true;

template <typename T>
struct remove_const {
  using type = T;
};
template <typename T>
struct remove_const<const T> {
  using type = T;
};
template <typename T>
using remove_const_t = typename remove_const<T>::type;

template <typename T, T kValue>
struct integral_constant {
  constexpr operator T() const { return kValue; }
};

template <typename T, T... kIndices>
struct integer_sequence {};
template <typename T, int kCount, T... kIndices>
struct sequence_of : sequence_of<T, kCount - 1, kCount - 1, kIndices...> {};
template <typename T, T... kIndices>
struct sequence_of<T, 0, kIndices...> {
  using type = integer_sequence<T, kIndices...>;
};
template <typename T, T kCount>
using make_integer_sequence = typename sequence_of<T, kCount>::type;

}  // namespace std

__device__ constexpr double __builtin_inf() {
  return __builtin_bit_cast(double, 0x7FF0000000000000ull);
}
__device__ constexpr double __builtin_nan(const char*) {
  return __builtin_bit_cast(double, 0x7FF8000000000000ull);
}
__device__ inline float __builtin_fmaf(float a, float b, float c) {
  return ::fmaf(a, b, c);
}

#endif
