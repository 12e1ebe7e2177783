// Attention of one segment on the tile unit.
//
// Invariant: the same result as the plain kernel's but for one rounding: weights are bfloat16 when
// they are multiplied with values (their sum is not).
//
// All is computed transposed. Scores are keys * queries^T: keys are then the first operand, which is
// read from the cache as it lies, and a vector register holds one key's scores of 16 queries, so that
// softmax needs nothing across lanes. Results are values^T * weights, where two keys' weights side by
// side are the second operand as they come out of it: only values are turned, once for all queries.

#include "attention.h"

#include "segment_ahead.h"
#include "tiles.h"
#include "vector.h"

#if SHOAL_AMX

#include <limits>

namespace shoal {

namespace {

constexpr int64_t kChunk = 256;  // keys between two updates of the sums
constexpr int64_t kRows = 16;
constexpr int64_t kTile = 256;  // float32 elements, or pairs of bfloat16
// Lines asked for ahead beside a tile of values, and beside two keys' weights.
constexpr int64_t kLinesPerTile = 12, kLinesPerPair = 2;
constexpr float kHidden = -std::numeric_limits<float>::infinity();

class AmxSegment {
 public:
  AmxSegment(const AttentionInputs<bf16>& in, const AttentionOptions& options,
             const AttentionPlan& plan, const Segment& segment, int64_t kv_head,
             SegmentAhead& ahead)
      : in_(in), options_(options), plan_(plan), segment_(segment), kv_head_(kv_head),
        ahead_(ahead),
        group_(in.shape.heads / in.shape.kv_heads), dim_(in.shape.dim),
        rows_(segment.count * group_), row_tiles_(round_up(rows_, kRows) / kRows),
        key_steps_(round_up(dim_, 32) / 32), value_tiles_(dim_ / 16),
        in_place_(in.block_size % 16 == 0 && dim_ % 32 == 0) {
    allocate();
    for (int64_t tile = 0; tile < row_tiles_; ++tile) load_queries(tile);
  }

  void run(float* partials) {
    const int64_t begin = first_visible(plan_, segment_, options_.window);
    // All of it outside of the window: not even times zero may what another segment left be added.
    if (begin >= segment_.high) std::fill_n(sums_, row_tiles_ * value_tiles_ * kTile, 0.0f);
    for (int64_t from = begin; from < segment_.high; from += kChunk) {
      const Chunk chunk{from, std::min(kChunk, segment_.high - from), from == begin};
      load_keys(chunk);
      load_values(chunk);
      int64_t tile = 0;
      for (; tile + 2 <= row_tiles_; tile += 2) attend<2>(tile, chunk);
      if (tile < row_tiles_) attend<1>(tile, chunk);
    }
    finish(partials);
  }

 private:
  // Keys [from, from + count).
  struct Chunk {
    int64_t from, count;
    bool first;  // of its segment
  };

  // Memory of this thread, kept between segments.
  struct Memory {
    Buffer<bf16> queries, keys, values, weights;
    Buffer<float> scores, sums, maxima, totals, result;
    Buffer<int32_t> positions;
  };

  void allocate() {
    static thread_local Memory memory;
    queries_ = memory.queries.reserve(row_tiles_ * key_steps_ * 2 * kTile);
    keys_ = memory.keys.reserve(kChunk * key_steps_ * 32);
    values_ = memory.values.reserve(kChunk / 32 * value_tiles_ * 2 * kTile);
    weights_ = memory.weights.reserve(2 * kChunk * kRows);
    scores_ = memory.scores.reserve(2 * kChunk * kRows);
    sums_ = memory.sums.reserve(row_tiles_ * value_tiles_ * kTile);
    maxima_ = memory.maxima.reserve(row_tiles_ * kRows);
    totals_ = memory.totals.reserve(row_tiles_ * kRows);
    result_ = memory.result.reserve(kRows * dim_);
    positions_ = memory.positions.reserve(row_tiles_ * kRows);
    std::fill_n(maxima_, row_tiles_ * kRows, kHidden);
    std::fill_n(totals_, row_tiles_ * kRows, 0.0f);
    // Padding rows look at what the last one looks at.
    const int64_t last = plan_.positions[segment_.first + segment_.count - 1];
    std::fill_n(positions_, row_tiles_ * kRows, static_cast<int32_t>(last));
  }

  // 16 rows as second operands.
  void load_queries(int64_t tile) {
    const int64_t first = tile * kRows, count = std::min(kRows, rows_ - first);
    const bf16* sources[kRows];
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = first + i, query = segment_.first + row / group_;
      sources[i] = in_.queries + plan_.tokens[query] * in_.shape.heads * dim_ +
                   (kv_head_ * group_ + row % group_) * dim_;
      positions_[row] = static_cast<int32_t>(plan_.positions[query]);
    }
    for (int64_t step = 0; step < key_steps_; ++step) {
      const int64_t left = std::min<int64_t>(32, dim_ - step * 32);
      const __mmask32 inside = left == 32 ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
      __m512i pairs[kRows];
      for (int64_t i = 0; i < kRows; ++i) {
        pairs[i] = i < count ? _mm512_maskz_loadu_epi16(inside, sources[i] + step * 32)
                             : _mm512_setzero_si512();
      }
      transpose(pairs);
      bf16* out = queries_ + (tile * key_steps_ + step) * 2 * kTile;
      for (int64_t i = 0; i < kRows; ++i) _mm512_storeu_si512(out + i * 32, pairs[i]);
    }
  }

  // First operands [16 keys], rows `key_stride()` elements apart: from the cache as they lie, or, where
  // a tile would reach beyond them, from a copy.
  void load_keys(const Chunk& chunk) {
    const int64_t stride = key_stride();
    for (int64_t key = 0; key < chunk.count; key += kRows) {
      if (in_place_) {
        key_tiles_[key / kRows] = cached(in_.keys, chunk.from + key);
        continue;
      }
      bf16* rows = keys_ + key * stride;
      key_tiles_[key / kRows] = rows;
      std::fill_n(rows, kRows * stride, bf16{0});
      for (int64_t t = 0; t < std::min(kRows, chunk.count - key); ++t) {
        std::copy_n(cached(in_.keys, chunk.from + key + t), dim_, rows + t * stride);
      }
    }
  }

  int64_t key_stride() const { return in_place_ ? dim_ : key_steps_ * 32; }

  const bf16* cached(const bf16* cache, int64_t place) const {
    return in_.at(cache, segment_.table[place / in_.block_size], kv_head_,
                  place % in_.block_size);
  }

  // What the keys of a chunk add to the results of N row tiles.
  template <int N>
  void attend(int64_t tile, Chunk chunk) {
    // Queries come in the order of their positions, or see all of the segment.
    const int64_t last = positions_[(tile + N) * kRows - 1];
    chunk.count = std::min(chunk.count, last + 1 - chunk.from);
    if (chunk.count <= 0) return;
    int64_t key = 0;
    for (; key + kRows < chunk.count; key += 2 * kRows) score<N, 2>(tile, key);
    if (key < chunk.count) score<N, 1>(tile, key);
    for (int64_t i = 0; i < N; ++i) weigh(tile + i, i, chunk);
    int64_t value = 0;
    for (; value + 2 <= value_tiles_; value += 2) accumulate<N, 2>(tile, value, chunk);
    if (value < value_tiles_) accumulate<N, 1>(tile, value, chunk);
  }

  // Scores [N, key, 16 rows] of K * 16 keys.
  template <int N, int K>
  void score(int64_t tile, int64_t key) {
    const bf16* const* keys = key_tiles_ + key / kRows;
    const bf16* queries = queries_ + tile * key_steps_ * 2 * kTile;
    const int64_t next = key_steps_ * 2 * kTile;
    multiply_tiles<K, N>(
        key_steps_, true, key_stride() * static_cast<int64_t>(sizeof(bf16)),
        [&](int64_t i, int64_t step) { return keys[i] + step * 32; },
        [&](int64_t i, int64_t step) { return queries + i * next + step * 2 * kTile; },
        [&](int64_t i, int64_t j) { return scores_ + (j * kChunk + key + i * kRows) * kRows; });
  }

  // Sums [16 elements of a value, 16 rows] of N row tiles and V tiles of elements.
  template <int N, int V>
  void accumulate(int64_t tile, int64_t value, const Chunk& chunk) {
    multiply_tiles<V, N>(
        (chunk.count + 31) / 32, chunk.first, 64,
        [&](int64_t i, int64_t step) {
          return values_ + (step * value_tiles_ + value + i) * 2 * kTile;
        },
        [&](int64_t j, int64_t step) { return weights_ + j * kChunk * kRows + step * 2 * kTile; },
        [&](int64_t i, int64_t j) {
          return sums_ + ((tile + j) * value_tiles_ + value + i) * kTile;
        });
  }

  // First operands [32 keys, value tile], 16 elements by 32 keys; nothing is read past the segment's
  // end.
  void load_values(const Chunk& chunk) {
    for (int64_t step = 0; step < chunk.count; step += 32) {
      const int64_t count = std::min<int64_t>(32, chunk.count - step);
      const auto place = [&](int64_t key) { return cached(in_.values, chunk.from + step + key); };
      bf16* tiles = values_ + step * value_tiles_ * kRows;
      if (in_place_) {
        const bf16* const halves[2] = {place(0), count > 16 ? place(16) : nullptr};
        const auto row = [&](int64_t key) { return halves[key / 16] + key % 16 * dim_; };
        if (count == 32) {
          turn_values(tiles, std::integral_constant<int64_t, 32>{}, row);
        } else {
          turn_values(tiles, count, row);
        }
      } else {
        const bf16* rows[32] = {};
        for (int64_t key = 0; key < count; ++key) rows[key] = place(key);
        turn_values(tiles, count, [&](int64_t key) { return rows[key]; });
      }
    }
  }

  // Of `count` keys, where row(key) is one's value.
  template <typename Count, typename Row>
  void turn_values(bf16* tiles, Count count, const Row& row) {
    for (int64_t tile = 0; tile < value_tiles_; ++tile) {
      const auto load = [&](int64_t key) {
        if (key >= count) return _mm256_setzero_si256();
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row(key) + tile * 16));
      };
      __m512i pairs[16];
      for (int64_t i = 0; i < 16; ++i) pairs[i] = interleave(load(2 * i), load(2 * i + 1));
      transpose(pairs);
      ahead_.fetch(kLinesPerTile);
      bf16* out = tiles + tile * 2 * kTile;
      for (int64_t i = 0; i < 16; ++i) _mm512_storeu_si512(out + i * 32, pairs[i]);
    }
  }

  // Which of 16 rows see a key.
  __mmask16 seen(int64_t tile, int64_t key) const {
    const __m512i positions = _mm512_loadu_si512(positions_ + tile * kRows);
    const __m512i place = _mm512_set1_epi32(static_cast<int32_t>(key));
    __mmask16 mask = _mm512_cmple_epi32_mask(place, positions);
    if (options_.window != 0) {
      const __m512i reach =
          _mm512_add_epi32(place, _mm512_set1_epi32(static_cast<int32_t>(options_.window)));
      mask &= _mm512_cmpgt_epi32_mask(reach, positions);
    }
    return mask;
  }

  bool all_seen(int64_t tile, int64_t from, int64_t count) const {
    return seen(tile, from) == 0xffff && seen(tile, from + count - 1) == 0xffff;
  }

  // Scores of a row tile, the `place`th of those at work, to weights, as second operands [32 keys];
  // rescales the sums so far.
  void weigh(int64_t tile, int64_t place, const Chunk& chunk) {
    const auto [from, count, first] = chunk;
    float* scores = scores_ + place * kChunk * kRows;
    bf16* weights = weights_ + place * kChunk * kRows;
    if (options_.softcap != 0.0f) cap(scores, count);
    const float scale = options_.softcap != 0.0f ? 1.0f : options_.scale;
    const __m512 hidden = _mm512_set1_ps(kHidden);
    const bool whole = all_seen(tile, from, count);
    if (!whole) {
      for (int64_t key = 0; key < count; ++key) {
        float* score = scores + key * kRows;
        const __m512 s = _mm512_loadu_ps(score);
        _mm512_storeu_ps(score, _mm512_mask_blend_ps(seen(tile, from + key), hidden, s));
      }
    }
    const __m512 old = _mm512_loadu_ps(maxima_ + tile * kRows);
    const __m512 maximum =
        _mm512_max_ps(old, _mm512_mul_ps(largest(scores, count), _mm512_set1_ps(scale)));
    // Rows that have seen nothing yet: any finite base gives them weights of zero.
    const __mmask16 blind = _mm512_cmpeq_ps_mask(maximum, hidden);
    const __m512 base = _mm512_mask_blend_ps(blind, maximum, _mm512_setzero_ps());
    const __m512 log2e = _mm512_set1_ps(kLog2E);
    const __m512 factor = exp2_16(_mm512_mul_ps(_mm512_sub_ps(old, base), log2e));
    if (!first && _mm512_cmpneq_ps_mask(maximum, old) != 0) rescale(tile, factor);
    const __m512 unit = _mm512_set1_ps(scale * kLog2E), shift = _mm512_mul_ps(base, log2e);
    const __m512 zero = _mm512_setzero_ps();
    __m512 evens = _mm512_mul_ps(_mm512_loadu_ps(totals_ + tile * kRows), factor), odds = zero;
    const auto weight = [&](int64_t key) {
      const __m512 s = _mm512_loadu_ps(scores + key * kRows);
      const __m512 w = exp2_16_rough(_mm512_fmsub_ps(s, unit, shift));
      return whole ? w : _mm512_maskz_mov_ps(_mm512_cmpneq_ps_mask(s, hidden), w);
    };
    for (int64_t key = 0; key < round_up(count, 32); key += 2) {
      const __m512 even = key < count ? weight(key) : zero;
      const __m512 odd = key + 1 < count ? weight(key + 1) : zero;
      evens = _mm512_add_ps(evens, even);
      odds = _mm512_add_ps(odds, odd);
      _mm512_storeu_si512(weights + key * kRows, round_pair(even, odd));
      ahead_.fetch(kLinesPerPair);
    }
    _mm512_storeu_ps(maxima_ + tile * kRows, maximum);
    _mm512_storeu_ps(totals_ + tile * kRows, _mm512_add_ps(evens, odds));
  }

  void cap(float* scores, int64_t count) const {
    const __m512 scale = _mm512_set1_ps(options_.scale);
    for (int64_t key = 0; key < count; ++key) {
      float* place = scores + key * kRows;
      const __m512 s = _mm512_mul_ps(_mm512_loadu_ps(place), scale);
      _mm512_storeu_ps(place, softcap_16(s, options_.softcap));
    }
  }

  // Of each row.
  static __m512 largest(const float* scores, int64_t count) {
    const auto of = [&](int64_t key) { return _mm512_loadu_ps(scores + key * kRows); };
    __m512 first = _mm512_set1_ps(kHidden), second = first;
    int64_t key = 0;
    for (; key + 4 <= count; key += 4) {
      first = _mm512_max_ps(first, _mm512_max_ps(of(key), of(key + 1)));
      second = _mm512_max_ps(second, _mm512_max_ps(of(key + 2), of(key + 3)));
    }
    for (; key < count; ++key) first = _mm512_max_ps(first, of(key));
    return _mm512_max_ps(first, second);
  }

  void rescale(int64_t tile, __m512 factor) {
    float* sums = sums_ + tile * value_tiles_ * kTile;
    for (int64_t i = 0; i < value_tiles_ * kTile; i += kRows) {
      _mm512_storeu_ps(sums + i, _mm512_mul_ps(_mm512_loadu_ps(sums + i), factor));
    }
  }

  void finish(float* partials) {
    for (int64_t tile = 0; tile < row_tiles_; ++tile) {
      for (int64_t value = 0; value < value_tiles_; ++value) {
        const float* sums = sums_ + (tile * value_tiles_ + value) * kTile;
        __m512i elements[kRows];
        for (int64_t i = 0; i < kRows; ++i) elements[i] = _mm512_loadu_si512(sums + i * kRows);
        transpose(elements);
        for (int64_t i = 0; i < kRows; ++i) {
          _mm512_storeu_si512(result_ + i * dim_ + value * 16, elements[i]);
        }
      }
      const int64_t first = tile * kRows, last = std::min(rows_, first + kRows);
      for (int64_t row = first; row < last; ++row) {
        finish_row(in_, options_, plan_, segment_, partials, segment_.first + row / group_,
                   kv_head_ * group_ + row % group_, result_ + (row - first) * dim_, maxima_[row],
                   totals_[row]);
      }
    }
  }

  const AttentionInputs<bf16>& in_;
  const AttentionOptions& options_;
  const AttentionPlan& plan_;
  const Segment& segment_;
  const int64_t kv_head_;
  SegmentAhead& ahead_;
  const int64_t group_, dim_, rows_, row_tiles_, key_steps_, value_tiles_;
  const bool in_place_;
  bf16 *queries_, *keys_, *values_, *weights_;
  const bf16* key_tiles_[kChunk / kRows];
  float *scores_, *sums_, *maxima_, *totals_, *result_;
  int32_t* positions_;
};

}  // namespace

void attend_segment_amx(const AttentionInputs<bf16>& in, const AttentionOptions& options,
                        const AttentionPlan& plan, const Segment& segment, int64_t kv_head,
                        float* partials, const Segment* next, int64_t next_head) {
  SegmentAhead ahead(in, next, next_head, kChunk);
  AmxSegment(in, options, plan, segment, kv_head, ahead).run(partials);
}

}  // namespace shoal

#endif
