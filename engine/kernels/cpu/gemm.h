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
// What of the L1 cache 32 rows may take, and the blocks of columns that then pass by.
constexpr int64_t kL1Bytes = 40 * 1024;
constexpr int64_t kGroupBlocks = 4;
// Cache lines of a block's weights that a step multiplies with, and how far ahead of them the memory
// is asked where they are read once.
constexpr int64_t kStepLines = 32;
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

// Which operand is found in the L1 cache by the next product; the other passes by.
enum class Stays { kRows, kWeights };

// Memory that is asked for while something else is multiplied: `lines` of 64 bytes in each step.
struct Ahead {
  const char* next;
  int64_t lines;

  void fetch() {
    for (int64_t line = 0; line < lines; ++line, next += 64) {
      // Into the L2 cache, whose queue of misses is longer than the L1 cache's.
      _mm_prefetch(next, _MM_HINT_T1);
    }
  }
};

// A macro, since a tile is named by a literal. `passes`: the L1 cache need not keep what is read.
#define SHOAL_LOAD_TILE(passes, tile, place, stride) \
  if constexpr (passes) {                            \
    _tile_stream_loadd(tile, place, stride);         \
  } else {                                           \
    _tile_loadd(tile, place, stride);                \
  }

// Multiplies blocks of 32 rows with blocks of 32 columns, and stores each result while the next is
// multiplied: the tile unit and the vector units work at the same time, and nothing waits for tiles
// that were stored just now.
template <typename Store>
class BlockProducts {
 public:
  // `a` as for `gemm`; `steps`: k / 32.
  BlockProducts(const bf16* a, int64_t a_stride, int64_t steps, const Store& store)
      : a_(a), stride_(a_stride), steps_(steps), store_(store) {}

  ~BlockProducts() { store_rest(); }

  BlockProducts(const BlockProducts&) = delete;
  BlockProducts& operator=(const BlockProducts&) = delete;

  // Rows [row, row + count), count <= 32, times the columns of `block`, whose weights are given.
  template <Stays kStays>
  void multiply(int64_t row, int64_t count, int64_t block, const bf16* weights, Ahead& ahead) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const bf16 *first = a_ + row * stride_, *second = first + 16 * stride_;
    const auto stride = static_cast<std::ptrdiff_t>(stride_ * sizeof(bf16));
    for (int64_t step = 0; step < steps_; ++step) {
      ahead.fetch();
      const bf16* b = weights + step * 2 * kTileElements;
      SHOAL_LOAD_TILE(kStays == Stays::kRows, 6, b, 64);
      SHOAL_LOAD_TILE(kStays == Stays::kWeights, 4, first + step * kStep, stride);
      _tile_dpbf16ps(0, 4, 6);
      store_next();
      SHOAL_LOAD_TILE(kStays == Stays::kRows, 7, b + kTileElements, 64);
      _tile_dpbf16ps(1, 4, 7);
      if (count > 16) {
        SHOAL_LOAD_TILE(kStays == Stays::kWeights, 5, second + step * kStep, stride);
        _tile_dpbf16ps(2, 5, 6);
        store_next();
        _tile_dpbf16ps(3, 5, 7);
      } else {
        store_next();
      }
    }
    store_rest();
    float* c = results_[turn_];
    turn_ = 1 - turn_;
    _tile_stored(0, c, 128);
    _tile_stored(1, c + 16, 128);
    if (count > 16) {
      _tile_stored(2, c + 16 * kBlockColumns, 128);
      _tile_stored(3, c + 16 * kBlockColumns + 16, 128);
    }
    row_ = row;
    left_ = count;
    block_ = block;
    values_ = c;
  }

 private:
  // One row of the block before.
  void store_next() {
    if (left_ == 0) return;
    store_(row_, block_, values_);
    ++row_;
    --left_;
    values_ += kBlockColumns;
  }

  void store_rest() {
    while (left_ != 0) store_next();
  }

  const bf16* a_;
  const int64_t stride_, steps_;
  const Store& store_;
  alignas(64) float results_[2][kBlockRows * kBlockColumns];
  int turn_ = 0;
  int64_t row_ = 0, left_ = 0, block_ = 0;  // what is not stored yet
  float* values_ = nullptr;
};

#undef SHOAL_LOAD_TILE

// `a` is [rows, k], its memory readable up to a multiple of 32 rows and of 32 columns, padding
// columns zero. Calls store(row, block, c) for each row of each block of the result, c [32] float32,
// which `store` may write to.
template <typename Store>
void gemm(const bf16* a, int64_t a_stride, int64_t rows, const bf16* packed, int64_t blocks,
          int64_t k, Team& team, const Store& store) {
  const int64_t steps = round_up(k, kStep) / kStep;
  const auto weights = [&](int64_t block) { return packed + block * steps * 2 * kTileElements; };
  const bool rows_fit = kBlockRows * steps * kStep * int64_t{sizeof(bf16)} <= kL1Bytes;
  const bool few = rows <= kBlockRows, alone = team.count() == 1;
  // Few rows read all weights at memory speed: in long stretches. Else threads that share a product
  // take one block at a time.
  const int64_t group = few ? team.grain(blocks) : alone && rows_fit ? kGroupBlocks : 1;
  const int64_t groups = (blocks + group - 1) / group;
  const int64_t tasks = (rows + kChunkRows - 1) / kChunkRows * groups;
  const auto first_block = [&](int64_t task) { return task % groups * group; };
  const auto address = [&](int64_t task) {
    return reinterpret_cast<const char*>(weights(first_block(task)));
  };
  team.share(tasks, [&](Claims& claims) {
    Tiles tiles;
    BlockProducts<Store> products(a, a_stride, steps, store);
    if (!few) Ahead{address(claims.upcoming()), group * steps * kStepLines}.fetch();
    while (claims.take()) {
      const int64_t begin = first_block(claims.task()), end = std::min(blocks, begin + group);
      int64_t row = claims.task() / groups * kChunkRows;
      const int64_t last_row = std::min(rows, row + kChunkRows);
      const int64_t row_blocks = (last_row - row + kBlockRows - 1) / kBlockRows;
      Ahead ahead{address(claims.upcoming()),
                  claims.has_upcoming() ? (kStepLines + row_blocks - 1) / row_blocks : 0};
      if (few) ahead = {address(claims.task()) + kPrefetchBytes, kStepLines};
      for (; row < last_row; row += kBlockRows) {
        const int64_t count = std::min(kBlockRows, last_row - row);
        for (int64_t block = begin; block < end; ++block) {
          if (!few && group == 1 && rows_fit) {
            products.template multiply<Stays::kWeights>(row, count, block, weights(block), ahead);
          } else {
            products.template multiply<Stays::kRows>(row, count, block, weights(block), ahead);
          }
        }
      }
    }
  });
}

#endif

}  // namespace shoal
