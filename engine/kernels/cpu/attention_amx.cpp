// Attention of one segment on the tile unit.
//
// Invariant: the same result as the plain kernel's but for one rounding: weights are bfloat16 when
// they are multiplied with values (their sum is not).
//
// Scores are computed transposed, keys * queries^T: keys are then the first operand, which is read
// from the cache as it lies, and a vector register holds one key's scores of 16 queries, so that
// softmax needs nothing across lanes.

#include "attention.h"

#include "amx.h"
#include "vector.h"

#if SHOAL_AMX

#include <limits>

namespace shoal {

namespace {

constexpr int64_t kChunk = 128;  // keys between two updates of the sums
constexpr int64_t kRows = 16;
constexpr int64_t kTile = 256;   // float32 elements, or pairs of bfloat16
constexpr float kHidden = -std::numeric_limits<float>::infinity();

__m512 softcap16(__m512 x, float cap) {
  __m512 z = _mm512_mul_ps(x, _mm512_set1_ps(2.0f * kLog2E / cap));
  z = _mm512_min_ps(z, _mm512_set1_ps(43.0f));
  const __m512 e = exp2_16(z), one = _mm512_set1_ps(1.0f);
  const __m512 tanh = _mm512_div_ps(_mm512_sub_ps(e, one), _mm512_add_ps(e, one));
  return _mm512_mul_ps(tanh, _mm512_set1_ps(cap));
}

// Two rows of 16 bfloat16, interleaved.
__m512i interleave(__m256i even, __m256i odd) {
  return _mm512_or_si512(_mm512_cvtepu16_epi32(even),
                         _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
}

__m512i round_pair(__m512 even, __m512 odd) {
  return interleave((__m256i)_mm512_cvtneps_pbh(even), (__m256i)_mm512_cvtneps_pbh(odd));
}

// 16 x 16 of 32 bits each, in place.
void transpose(__m512i* rows) {
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

class AmxSegment {
 public:
  AmxSegment(const AttentionInputs<bf16>& in, const AttentionOptions& options,
             const AttentionPlan& plan, const Segment& segment, int64_t kv_head)
      : in_(in), options_(options), plan_(plan), segment_(segment), kv_head_(kv_head),
        group_(in.shape.heads / in.shape.kv_heads), dim_(in.shape.dim),
        rows_(segment.count * group_), row_tiles_(round_up(rows_, kRows) / kRows),
        key_steps_(round_up(dim_, 32) / 32), value_tiles_(dim_ / 16),
        in_place_(in.block_size % 16 == 0 && dim_ % 32 == 0) {
    allocate();
    for (int64_t tile = 0; tile < row_tiles_; ++tile) load_queries(tile);
  }

  void run(float* partials) {
    const int64_t begin = first_visible(plan_, segment_, options_.window);
    for (int64_t from = begin; from < segment_.high; from += kChunk) {
      const int64_t count = std::min(kChunk, segment_.high - from);
      score(from, count);
      load_values(from, count);
      for (int64_t tile = 0; tile < row_tiles_; ++tile) weigh(tile, from, count, from == begin);
      // Not before all are weighed: a tile cannot be loaded from what was stored just now.
      for (int64_t tile = 0; tile < row_tiles_; ++tile) accumulate(tile, count);
    }
    finish(partials);
  }

 private:
  // Memory of this thread, kept between segments.
  struct Memory {
    Buffer<bf16> queries, keys, values, weights;
    Buffer<float> scores, sums, maxima, totals, row_sum;
    Buffer<int32_t> positions;
  };

  void allocate() {
    static thread_local Memory memory;
    queries_ = memory.queries.reserve(row_tiles_ * key_steps_ * 2 * kTile);
    keys_ = memory.keys.reserve(kRows * key_steps_ * 32);
    values_ = memory.values.reserve(kChunk / 32 * value_tiles_ * 2 * kTile);
    weights_ = memory.weights.reserve(row_tiles_ * kChunk / 32 * 2 * kTile);
    scores_ = memory.scores.reserve(row_tiles_ * kChunk * kRows);
    sums_ = memory.sums.reserve(row_tiles_ * value_tiles_ * kTile);
    maxima_ = memory.maxima.reserve(row_tiles_ * kRows);
    totals_ = memory.totals.reserve(row_tiles_ * kRows);
    row_sum_ = memory.row_sum.reserve(dim_);
    positions_ = memory.positions.reserve(row_tiles_ * kRows);
    std::fill_n(sums_, row_tiles_ * value_tiles_ * kTile, 0.0f);
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

  // 16 keys from `from` as a first operand, rows `stride` elements apart.
  const bf16* key_rows(int64_t from, int64_t& stride) {
    if (in_place_) {
      stride = dim_;
      return cached(in_.keys, from);
    }
    stride = key_steps_ * 32;
    for (int64_t t = 0; t < kRows; ++t) {
      bf16* row = keys_ + t * stride;
      std::fill_n(row, stride, bf16{0});
      if (from + t < segment_.high) std::copy_n(cached(in_.keys, from + t), dim_, row);
    }
    return keys_;
  }

  const bf16* cached(const bf16* cache, int64_t place) const {
    return in_.at(cache, segment_.table[place / in_.block_size], kv_head_,
                  place % in_.block_size);
  }

  // scores [row tile, key, 16 rows]
  void score(int64_t from, int64_t count) {
    for (int64_t key = 0; key < count; key += kRows) {
      int64_t stride = 0;
      const bf16* rows = key_rows(from + key, stride);
      int64_t tile = 0;
      for (; tile + 4 <= row_tiles_; tile += 4) score_tiles<4>(rows, stride, tile, key);
      for (; tile + 2 <= row_tiles_; tile += 2) score_tiles<2>(rows, stride, tile, key);
      if (tile < row_tiles_) score_tiles<1>(rows, stride, tile, key);
    }
  }

  // N row tiles at once: a product waits for the one before it on the same tile.
  template <int N>
  void score_tiles(const bf16* rows, int64_t stride, int64_t tile, int64_t key) {
    _tile_zero(0);
    if constexpr (N > 1) _tile_zero(1);
    if constexpr (N > 2) _tile_zero(2);
    if constexpr (N > 3) _tile_zero(3);
    const auto query = [&](int64_t index, int64_t step) {
      return queries_ + ((tile + index) * key_steps_ + step) * 2 * kTile;
    };
    for (int64_t step = 0; step < key_steps_; ++step) {
      _tile_loadd(4, rows + step * 32, stride * static_cast<int64_t>(sizeof(bf16)));
      _tile_loadd(5, query(0, step), 64);
      _tile_dpbf16ps(0, 4, 5);
      if constexpr (N > 1) {
        _tile_loadd(6, query(1, step), 64);
        _tile_dpbf16ps(1, 4, 6);
      }
      if constexpr (N > 2) {
        _tile_loadd(7, query(2, step), 64);
        _tile_dpbf16ps(2, 4, 7);
      }
      if constexpr (N > 3) {
        _tile_loadd(5, query(3, step), 64);
        _tile_dpbf16ps(3, 4, 5);
      }
    }
    const auto out = [&](int64_t index) {
      return scores_ + ((tile + index) * kChunk + key) * kRows;
    };
    _tile_stored(0, out(0), 64);
    if constexpr (N > 1) _tile_stored(1, out(1), 64);
    if constexpr (N > 2) _tile_stored(2, out(2), 64);
    if constexpr (N > 3) _tile_stored(3, out(3), 64);
  }

  // Second operands [32 keys, value tile]; nothing is read past the segment's end.
  void load_values(int64_t from, int64_t count) {
    const __m256i zero = _mm256_setzero_si256();
    const bf16* rows = nullptr;  // of 16 keys, where they lie together
    const auto row = [&](int64_t key) -> const bf16* {
      if (key >= count) return nullptr;
      return in_place_ ? rows + key % 16 * dim_ : cached(in_.values, from + key);
    };
    for (int64_t key = 0; key < round_up(count, 32); key += 2) {
      if (in_place_ && key % 16 == 0 && key < count) rows = cached(in_.values, from + key);
      const bf16 *even = row(key), *odd = row(key + 1);
      bf16* tiles = values_ + key / 32 * value_tiles_ * 2 * kTile + key % 32 / 2 * 32;
      for (int64_t tile = 0; tile < value_tiles_; ++tile) {
        const auto load = [&](const bf16* values) {
          if (values == nullptr) return zero;
          return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + tile * 16));
        };
        _mm512_storeu_si512(tiles + tile * 2 * kTile, interleave(load(even), load(odd)));
      }
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

  // Scores of 16 rows to weights, as first operands [32 keys]; rescales the sums so far.
  void weigh(int64_t tile, int64_t from, int64_t count, bool first) {
    float* scores = scores_ + tile * kChunk * kRows;
    if (options_.softcap != 0.0f) cap(scores, count);
    const float scale = options_.softcap != 0.0f ? 1.0f : options_.scale;
    const __m512 hidden = _mm512_set1_ps(kHidden);
    const bool whole = all_seen(tile, from, count);
    if (!whole) {
      for (int64_t key = 0; key < count; ++key) {
        float* place = scores + key * kRows;
        const __m512 s = _mm512_loadu_ps(place);
        _mm512_storeu_ps(place, _mm512_mask_blend_ps(seen(tile, from + key), hidden, s));
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
    const __m512 unit = _mm512_set1_ps(scale * kLog2E), shift = _mm512_mul_ps(base, log2e);
    const __m512 zero = _mm512_setzero_ps();
    __m512 evens = _mm512_mul_ps(_mm512_loadu_ps(totals_ + tile * kRows), factor), odds = zero;
    for (int64_t step = 0; step < count; step += 32) {
      __m512i pairs[16];
      for (int64_t i = 0; i < 16; ++i) {
        const int64_t key = step + 2 * i;
        const auto weight = [&](int64_t k) {
          if (k >= count) return zero;
          const __m512 s = _mm512_loadu_ps(scores + k * kRows);
          const __m512 w = exp2_16(_mm512_fmsub_ps(s, unit, shift));
          return whole ? w : _mm512_maskz_mov_ps(_mm512_cmpneq_ps_mask(s, hidden), w);
        };
        const __m512 even = weight(key), odd = weight(key + 1);
        evens = _mm512_add_ps(evens, even);
        odds = _mm512_add_ps(odds, odd);
        pairs[i] = round_pair(even, odd);
      }
      transpose(pairs);
      bf16* out = weights(tile, step);
      for (int64_t i = 0; i < 16; ++i) _mm512_storeu_si512(out + i * 32, pairs[i]);
    }
    _mm512_storeu_ps(maxima_ + tile * kRows, maximum);
    _mm512_storeu_ps(totals_ + tile * kRows, _mm512_add_ps(evens, odds));
    if (!first && _mm512_cmpneq_ps_mask(maximum, old) != 0) rescale(tile, factor);
  }

  // Of 16 rows and the 32 keys from `step` on.
  bf16* weights(int64_t tile, int64_t step) const {
    return weights_ + (tile * kChunk + step) / 32 * 2 * kTile;
  }

  void cap(float* scores, int64_t count) const {
    const __m512 scale = _mm512_set1_ps(options_.scale);
    for (int64_t key = 0; key < count; ++key) {
      float* place = scores + key * kRows;
      const __m512 s = _mm512_mul_ps(_mm512_loadu_ps(place), scale);
      _mm512_storeu_ps(place, softcap16(s, options_.softcap));
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
    alignas(64) float factors[kRows];
    _mm512_store_ps(factors, factor);
    float* sums = sums_ + tile * value_tiles_ * kTile;
    for (int64_t value = 0; value < value_tiles_; ++value) {
      for (int64_t row = 0; row < kRows; ++row) {
        float* place = sums + value * kTile + row * 16;
        _mm512_storeu_ps(place,
                         _mm512_mul_ps(_mm512_loadu_ps(place), _mm512_set1_ps(factors[row])));
      }
    }
  }

  void accumulate(int64_t tile, int64_t count) {
    int64_t value = 0;
    for (; value + 4 <= value_tiles_; value += 4) accumulate_tiles<4>(tile, value, count);
    for (; value + 2 <= value_tiles_; value += 2) accumulate_tiles<2>(tile, value, count);
    if (value < value_tiles_) accumulate_tiles<1>(tile, value, count);
  }

  // Of N value tiles at once.
  template <int N>
  void accumulate_tiles(int64_t tile, int64_t first, int64_t count) {
    const auto sums = [&](int64_t index) {
      return sums_ + (tile * value_tiles_ + first + index) * kTile;
    };
    _tile_loadd(0, sums(0), 64);
    if constexpr (N > 1) _tile_loadd(1, sums(1), 64);
    if constexpr (N > 2) _tile_loadd(2, sums(2), 64);
    if constexpr (N > 3) _tile_loadd(3, sums(3), 64);
    for (int64_t step = 0; step < count; step += 32) {
      const auto values = [&](int64_t index) {
        return values_ + (step / 32 * value_tiles_ + first + index) * 2 * kTile;
      };
      _tile_loadd(4, weights(tile, step), 64);
      _tile_loadd(5, values(0), 64);
      _tile_dpbf16ps(0, 4, 5);
      if constexpr (N > 1) {
        _tile_loadd(6, values(1), 64);
        _tile_dpbf16ps(1, 4, 6);
      }
      if constexpr (N > 2) {
        _tile_loadd(7, values(2), 64);
        _tile_dpbf16ps(2, 4, 7);
      }
      if constexpr (N > 3) {
        _tile_loadd(5, values(3), 64);
        _tile_dpbf16ps(3, 4, 5);
      }
    }
    _tile_stored(0, sums(0), 64);
    if constexpr (N > 1) _tile_stored(1, sums(1), 64);
    if constexpr (N > 2) _tile_stored(2, sums(2), 64);
    if constexpr (N > 3) _tile_stored(3, sums(3), 64);
  }

  void finish(float* partials) {
    float* sum = row_sum_;
    for (int64_t row = 0; row < rows_; ++row) {
      for (int64_t value = 0; value < value_tiles_; ++value) {
        const float* source =
            sums_ + (row / kRows * value_tiles_ + value) * kTile + row % kRows * 16;
        _mm512_storeu_ps(sum + value * 16, _mm512_loadu_ps(source));
      }
      finish_row(in_, options_, plan_, segment_, partials, segment_.first + row / group_,
                 kv_head_ * group_ + row % group_, sum, maxima_[row], totals_[row]);
    }
  }

  const AttentionInputs<bf16>& in_;
  const AttentionOptions& options_;
  const AttentionPlan& plan_;
  const Segment& segment_;
  const int64_t kv_head_, group_, dim_, rows_, row_tiles_, key_steps_, value_tiles_;
  const bool in_place_;
  bf16 *queries_, *keys_, *values_, *weights_;
  float *scores_, *sums_, *maxima_, *totals_, *row_sum_;
  int32_t* positions_;
};

}  // namespace

void prefetch_segment_amx(const AttentionInputs<bf16>& in, const Segment& segment,
                          int64_t kv_head) {
  const int64_t end = std::min(segment.low + kChunk, segment.high);
  const int64_t row_bytes = in.shape.dim * static_cast<int64_t>(sizeof(bf16));
  for (int64_t place = segment.low; place < end;) {
    const int64_t offset = place % in.block_size;
    const int64_t rows = std::min(in.block_size - offset, end - place);
    const int32_t block = segment.table[place / in.block_size];
    for (const bf16* cache : {in.keys, in.values}) {
      const auto* bytes = reinterpret_cast<const char*>(in.at(cache, block, kv_head, offset));
      for (int64_t i = 0; i < rows * row_bytes; i += 64) _mm_prefetch(bytes + i, _MM_HINT_T1);
    }
    place += rows;
  }
}

void attend_segment_amx(const AttentionInputs<bf16>& in, const AttentionOptions& options,
                        const AttentionPlan& plan, const Segment& segment, int64_t kv_head,
                        float* partials) {
  AmxSegment(in, options, plan, segment, kv_head).run(partials);
}

}  // namespace shoal

#endif
