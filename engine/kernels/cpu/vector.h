// Sixteen float32 at a time, for the kernels that are written in intrinsics.
//
// Invariant: each function has a plain counterpart in common.h or ops.h, with the same result but for
// its last bits.

#pragma once

#include "common.h"

#if SHOAL_AMX

#include <immintrin.h>

namespace shoal {

constexpr float kLog2E = 1.44269504088896341f;

// 2^x for x <= 126, by `polynomial` of what is left of x, |r| <= 1/2; below -125 it stays where it is
// there, next to nothing. (Splitting and scaling by the instructions for it, vrndscaleps and
// vscalefps, takes half as long again.) A NaN stays one as long as the low bits of its payload are
// zero, which they are in whatever came from bfloat16.
template <typename Polynomial>
__m512 exp2_by(__m512 x, const Polynomial& polynomial) {
  x = _mm512_max_ps(_mm512_set1_ps(-125.0f), x);
  // Adding 1.5 * 2^23 leaves the nearest integer in the low mantissa bits.
  const __m512 shift = _mm512_set1_ps(12582912.0f), shifted = _mm512_add_ps(x, shift);
  const __m512 p = polynomial(_mm512_sub_ps(x, _mm512_sub_ps(shifted, shift)));
  const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), exponent));
}

// To 3e-6 relative; the polynomials have the least relative error of their degree.
inline __m512 exp2_16(__m512 x) {
  return exp2_by(x, [](__m512 r) {
    __m512 p = _mm512_set1_ps(9.57008620e-3f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.59178591e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.40247452e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.93121815e-1f));
    return _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.99999261e-1f));
  });
}

// To 8e-5, for what is rounded to bfloat16 (4e-3) next.
inline __m512 exp2_16_rough(__m512 x) {
  return exp2_by(x, [](__m512 r) {
    __m512 p = _mm512_set1_ps(5.51716695e-2f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.42611125e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.93260986e-1f));
    return _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.99928073e-1f));
  });
}

// cap * tanh(x / cap)
inline __m512 softcap_16(__m512 x, float cap) {
  __m512 z = _mm512_mul_ps(x, _mm512_set1_ps(2.0f * kLog2E / cap));
  z = _mm512_min_ps(z, _mm512_set1_ps(43.0f));
  const __m512 e = exp2_16(z), one = _mm512_set1_ps(1.0f);
  const __m512 tanh = _mm512_div_ps(_mm512_sub_ps(e, one), _mm512_add_ps(e, one));
  return _mm512_mul_ps(tanh, _mm512_set1_ps(cap));
}

inline __m512 load_16(const bf16* values) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

inline void store_16(bf16* place, __m512 values) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(place), (__m256i)_mm512_cvtneps_pbh(values));
}

// Of n values, a multiple of 16.
inline float sum_of_squares(const float* x, int64_t n) {
  __m512 even = _mm512_setzero_ps(), odd = even;
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    const __m512 first = _mm512_loadu_ps(x + i), second = _mm512_loadu_ps(x + i + 16);
    even = _mm512_fmadd_ps(first, first, even);
    odd = _mm512_fmadd_ps(second, second, odd);
  }
  if (i < n) {
    const __m512 last = _mm512_loadu_ps(x + i);
    even = _mm512_fmadd_ps(last, last, even);
  }
  return _mm512_reduce_add_ps(_mm512_add_ps(even, odd));
}

// out [n] = x * scale * weight, n a multiple of 16.
inline void scale_row(const float* x, float scale, const float* weight, int64_t n, bf16* out) {
  const __m512 factor = _mm512_set1_ps(scale);
  for (int64_t i = 0; i < n; i += 16) {
    const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(x + i), factor);
    store_16(out + i, _mm512_mul_ps(scaled, _mm512_loadu_ps(weight + i)));
  }
}

// What ops.h's turn_head does to the pairs (i, i + half), half a multiple of 16.
inline void turn_pairs(const bf16* in, const float* weight, float scale, const float* cos,
                       const float* sin, int64_t half, bf16* out) {
  for (int64_t i = 0; i < half; i += 16) {
    __m512 first = load_16(in + i), second = load_16(in + i + half);
    if (weight != nullptr) {
      const __m512 factor = _mm512_set1_ps(scale);
      first = _mm512_mul_ps(_mm512_mul_ps(first, factor), _mm512_loadu_ps(weight + i));
      second = _mm512_mul_ps(_mm512_mul_ps(second, factor), _mm512_loadu_ps(weight + i + half));
    }
    const __m512 c = _mm512_loadu_ps(cos + i), s = _mm512_loadu_ps(sin + i);
    store_16(out + i, _mm512_fmsub_ps(first, c, _mm512_mul_ps(second, s)));
    store_16(out + i + half, _mm512_fmadd_ps(second, c, _mm512_mul_ps(first, s)));
  }
}

// out [16] = silu(values [16]) * values [16:32]
inline void silu_times(const float* values, bf16* out) {
  const __m512 gate = _mm512_loadu_ps(values), up = _mm512_loadu_ps(values + 16);
  // Beyond that the quotient is 0 all the same.
  const __m512 power =
      _mm512_min_ps(_mm512_set1_ps(120.0f), _mm512_mul_ps(gate, _mm512_set1_ps(-kLog2E)));
  const __m512 divisor = _mm512_add_ps(exp2_16(power), _mm512_set1_ps(1.0f));
  // One step of Newton's on the estimate of 1 / divisor: 14 bits become 28.
  const __m512 estimate = _mm512_rcp14_ps(divisor);
  const __m512 reciprocal = _mm512_mul_ps(
      estimate, _mm512_fnmadd_ps(divisor, estimate, _mm512_set1_ps(2.0f)));
  store_16(out, _mm512_mul_ps(_mm512_mul_ps(gate, reciprocal), up));
}

}  // namespace shoal

#endif
