// Operands of the tile unit, and products of up to two by two tiles.
//
// Invariant: a second operand holds rows of 16 pairs: what is multiplied with elements 2 * i and
// 2 * i + 1 of the first lies side by side in its row i.

#pragma once

#include "amx.h"

#if SHOAL_AMX

namespace shoal {

// Two rows of 16 bfloat16, interleaved.
inline __m512i interleave(__m256i even, __m256i odd) {
  return _mm512_or_si512(_mm512_cvtepu16_epi32(even),
                         _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
}

// The same of float32, rounded to nearest, up from the middle: half as long as the instruction that
// rounds to even.
inline __m512i round_pair(__m512 even, __m512 odd) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i low = _mm512_srli_epi32(_mm512_add_epi32((__m512i)even, half), 16);
  return _mm512_mask_blend_epi16(0xaaaaaaaa, low, _mm512_add_epi32((__m512i)odd, half));
}

// 16 x 16 of 32 bits each, in place.
inline void transpose(__m512i* rows) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88);
    a[i + 4] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xdd);
    a[i + 8] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88);
    a[i + 12] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0x88);
    rows[i + 8] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0xdd);
    rows[i + 4] = _mm512_shuffle_i32x4(a[i + 4], a[i + 12], 0x88);
    rows[i + 12] = _mm512_shuffle_i32x4(a[i + 4], a[i + 12], 0xdd);
  }
}

// out(i, j) = or += the sum over steps of a(i, step) * b(j, step), each one tile, I and J up to 2.
template <int I, int J, typename A, typename B, typename Out>
void multiply_tiles(int64_t steps, bool is_new, int64_t a_stride, const A& a, const B& b,
                     const Out& out) {
  if (is_new) {
    _tile_zero(0);
    if constexpr (J > 1) _tile_zero(1);
    if constexpr (I > 1) _tile_zero(2);
    if constexpr (I > 1 && J > 1) _tile_zero(3);
  } else {
    _tile_loadd(0, out(0, 0), 64);
    if constexpr (J > 1) _tile_loadd(1, out(0, 1), 64);
    if constexpr (I > 1) _tile_loadd(2, out(1, 0), 64);
    if constexpr (I > 1 && J > 1) _tile_loadd(3, out(1, 1), 64);
  }
  for (int64_t step = 0; step < steps; ++step) {
    _tile_loadd(4, a(0, step), a_stride);
    _tile_loadd(6, b(0, step), 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (J > 1) {
      _tile_loadd(7, b(1, step), 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (I > 1) {
      _tile_loadd(5, a(1, step), a_stride);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (J > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, out(0, 0), 64);
  if constexpr (J > 1) _tile_stored(1, out(0, 1), 64);
  if constexpr (I > 1) _tile_stored(2, out(1, 0), 64);
  if constexpr (I > 1 && J > 1) _tile_stored(3, out(1, 1), 64);
}

}  // namespace shoal

#endif
