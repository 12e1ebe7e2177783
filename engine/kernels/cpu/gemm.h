// Products with bfloat16 weights on the tile unit, for any number of rows.
//
// Invariant: weights are read in the order they lie in memory, once for each chunk of rows, so that
// a product of few rows runs at memory speed and one of many at the tile unit's.
//
// Packed weights of a [N, K] matrix: blocks of 32 columns (N padded), each ceil(K / 32) steps of two
// tiles of 16 columns; a tile is [16 pairs of k][16 columns][2], what TDPBF16PS takes as its second
// operand. Padding is zero. "Paired" packing puts 16 rows of the first half of the matrix beside the
// same 16 of the second, so that a gate and its up-projection meet in one block.

#pragma once

#include <algorithm>
#include <cstddef>

#include "amx.h"
#include "team.h"

namespace shoal {

constexpr int64_t kBlockColumns = 32;
constexpr int64_t kStep = 32;
constexpr int64_t kTileElements = 512;
constexpr int64_t kBlockRows = 32;
// Rows whose inputs stay in a core's L2 cache while the weights pass by.
constexpr int64_t kChunkRows = 384;
constexpr int64_t kPrefetchBytes = 4096;

inline int64_t packed_elements(int64_t n, int64_t k) {
  return round_up(n, kBlockColumns) * round_up(k, kStep);
}

// Source row of column `column` of block `block`; n or more: padding.
inline int64_t packed_row(int64_t block, int64_t column, int64_t n, bool paired) {
  if (!paired) return block * kBlockColumns + column;
  const int64_t half = n / 2, row = block * 16 + column % 16;
  if (row >= half) return n;
  return column < 16 ? row : half + row;
}

inline int64_t packed_blocks(int64_t n, bool paired) {
  return paired ? round_up(n / 2, 16) / 16 : round_up(n, kBlockColumns) / kBlockColumns;
}

// `weight` [n, k] row by row to `packed`, packed_blocks * 32 * round_up(k, 32) elements.
void pack_weight(const bf16* weight, int64_t n, int64_t k, bool paired, bf16* packed);

// Element (row, column) of an unpaired packed matrix.
inline bf16 packed_at(const bf16* packed, int64_t k, int64_t row, int64_t column) {
  const int64_t steps = round_up(k, kStep) / kStep;
  const int64_t block = row / kBlockColumns, tile = row % kBlockColumns / 16;
  const bf16* base = packed + ((block * steps + column / kStep) * 2 + tile) * kTileElements;
  return base[(column % kStep / 2) * 32 + row % 16 * 2 + column % 2];
}

#if SHOAL_AMX

// c [32, 32] = a [32, k] * one block of columns; the second 16 rows only if `both`. `Ahead`: the
// block is not in a cache yet.
template <bool Ahead>
inline void multiply_block(const bf16* a, int64_t a_stride, const bf16* block, int64_t steps,
                           bool both, float* c) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const bf16* second = a + 16 * a_stride;
  const auto stride = static_cast<std::ptrdiff_t>(a_stride * sizeof(bf16));
  for (int64_t step = 0; step < steps; ++step) {
    const bf16* b = block + step * 2 * kTileElements;
    if constexpr (Ahead) {
      // Into the L2 cache, whose queue of misses is longer than the L1 cache's.
      for (int64_t line = 0; line < 32; ++line) {
        _mm_prefetch(reinterpret_cast<const char*>(b) + kPrefetchBytes + line * 64, _MM_HINT_T1);
      }
    }
    _tile_loadd(4, a + step * kStep, stride);
    _tile_loadd(6, b, 64);
    _tile_loadd(7, b + kTileElements, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (both) {
      _tile_loadd(5, second + step * kStep, stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, 128);
  _tile_stored(1, c + 16, 128);
  if (both) {
    _tile_stored(2, c + 16 * 32, 128);
    _tile_stored(3, c + 16 * 32 + 16, 128);
  }
}

// `a` is [rows, k], its memory readable up to a multiple of 32 rows and of 32 columns, padding
// columns zero. Calls store(first_row, num_rows, block, c) for each block of the result,
// c [num_rows, 32] float32 row by row.
template <typename Store>
void gemm(const bf16* a, int64_t a_stride, int64_t rows, const bf16* packed, int64_t blocks,
          int64_t k, Team& team, const Store& store) {
  const int64_t steps = round_up(k, kStep) / kStep;
  const int64_t chunks = (rows + kChunkRows - 1) / kChunkRows;
  team.run(chunks * blocks, team.grain(chunks * blocks), [&](int64_t begin, int64_t end) {
    Tiles tiles;
    alignas(64) float c[kBlockRows * kBlockColumns];
    for (int64_t task = begin; task < end; ++task) {
      const int64_t chunk = task / blocks, block = task % blocks;
      const bf16* weights = packed + block * steps * 2 * kTileElements;
      const int64_t last = std::min(rows, (chunk + 1) * kChunkRows);
      for (int64_t row = chunk * kChunkRows; row < last; row += kBlockRows) {
        const int64_t count = std::min(kBlockRows, last - row);
        const bf16* rows_in = a + row * a_stride;
        if (row == chunk * kChunkRows) {
          multiply_block<true>(rows_in, a_stride, weights, steps, count > 16, c);
        } else {
          multiply_block<false>(rows_in, a_stride, weights, steps, count > 16, c);
        }
        store(row, count, block, c);
      }
    }
  });
}

#endif

}  // namespace shoal
