// Scalars that every kernel shares: bfloat16, a vectorisable exp, and what the compiler may use.
//
// Invariant: arithmetic is float32; bfloat16 is how values are stored, rounded to nearest even.
// Loops here and in the kernels are plain ones that a compiler vectorises for its target; only the
// AMX kernels are written in intrinsics, and each has a plain counterpart.

#pragma once

#include <cstdint>
#include <cstring>
#include <new>

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && \
    defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__linux__)
#define SHOAL_AMX 1
#else
#define SHOAL_AMX 0
#endif

namespace shoal {

struct bf16 {
  uint16_t bits;
};

inline float to_float(float value) { return value; }

inline float to_float(bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

template <typename T>
T from_float(float value);

template <>
inline float from_float<float>(float value) {
  return value;
}

template <>
inline bf16 from_float<bf16>(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  // Rounding could carry a NaN over into infinity.
  return {static_cast<uint16_t>(value != value ? 0x7fc0u : rounded)};
}

// exp(x) to about 2 ulp for x <= 88; below -87 it stays at the smallest normal number. Without a
// branch or call, so that loops over it vectorise. Range reduction by ln 2 in two parts and a
// minimax polynomial, as in Cephes expf (https://www.netlib.org/cephes/).
inline float fast_exp(float x) {
  x = x < -87.0f ? -87.0f : x;
  // Adding 1.5 * 2^23 leaves the nearest integer in the low mantissa bits.
  const float shift = 12582912.0f;
  const float n = (x * 1.44269504088896341f + shift) - shift;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}

inline float fast_tanh(float x) {
  const float limited = x > 15.0f ? 15.0f : (x < -15.0f ? -15.0f : x);
  const float e = fast_exp(2.0f * limited);
  return (e - 1.0f) / (e + 1.0f);
}

inline int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Memory of one step that is kept for the next: grows, never shrinks, starts out as zeros, so that
// padding between what the kernels write is never anything but zero.
template <typename T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { release(); }

  T* reserve(int64_t count) {
    if (count > count_) {
      release();
      count_ = count + count / 4;
      data_ = static_cast<T*>(::operator new(sizeof(T) * count_, std::align_val_t(64)));
      std::memset(static_cast<void*>(data_), 0, sizeof(T) * count_);
    }
    return data_;
  }
  T* data() const { return data_; }

 private:
  void release() {
    if (data_ != nullptr) ::operator delete(data_, std::align_val_t(64));
    data_ = nullptr;
  }
  T* data_ = nullptr;
  int64_t count_ = 0;
};

}  // namespace shoal
