// The memory that a segment reads first, asked for a few lines at a time while another one is
// computed. (All at once they would wait for each other: a core keeps track of 16.)

#pragma once

#include "attention.h"

#if SHOAL_AMX

#include <immintrin.h>

namespace shoal {

class SegmentAhead {
 public:
  // Its first `count` keys and values. `segment` may be null: there is nothing to ask for.
  SegmentAhead(const AttentionInputs<bf16>& in, const Segment* segment, int64_t kv_head,
               int64_t count)
      : in_(in), segment_(segment), kv_head_(kv_head) {
    if (segment == nullptr) return;
    place_ = segment->low;
    end_ = std::min(segment->low + count, segment->high);
    open();
  }

  void fetch(int64_t lines) {
    for (; lines > 0 && place_ < end_; --lines) {
      _mm_prefetch(keys_ + offset_, _MM_HINT_T1);
      _mm_prefetch(values_ + offset_, _MM_HINT_T1);
      offset_ += 64;
      if (offset_ < bytes_) continue;
      place_ += rows_;
      open();
    }
  }

 private:
  // The rows from `place_` on that lie together.
  void open() {
    if (place_ >= end_) return;
    const int64_t row = place_ % in_.block_size;
    const int32_t block = segment_->table[place_ / in_.block_size];
    rows_ = std::min(in_.block_size - row, end_ - place_);
    keys_ = reinterpret_cast<const char*>(in_.at(in_.keys, block, kv_head_, row));
    values_ = reinterpret_cast<const char*>(in_.at(in_.values, block, kv_head_, row));
    bytes_ = rows_ * in_.shape.dim * static_cast<int64_t>(sizeof(bf16));
    offset_ = 0;
  }

  const AttentionInputs<bf16>& in_;
  const Segment* segment_;
  const int64_t kv_head_;
  int64_t place_ = 0, end_ = 0, rows_ = 0, bytes_ = 0, offset_ = 0;
  const char *keys_ = nullptr, *values_ = nullptr;
};

}  // namespace shoal

#endif
