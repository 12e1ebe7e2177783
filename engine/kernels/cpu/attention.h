// Attention of a step's queries over the paged cache, segment by segment.
//
// Invariant: nothing at or past a sequence's length reaches a result. Freed blocks may hold NaN and
// 0 * NaN is NaN, so a hidden score is overwritten, whatever it was, and values past a segment's end
// are never multiplied. Scores, softmax and sums are float32.

#pragma once

#include "attention_plan.h"
#include "ops.h"

namespace shoal {

struct AttentionOptions {
  float scale;
  int64_t window = 0;  // keys a query sees, itself included; 0: all before it
  float softcap = 0.0f;  // 0: none
  const float* sinks = nullptr;  // [heads]
};

template <typename T>
struct AttentionInputs {
  const T* queries;  // [T, heads, dim]
  const T* keys;     // [num_blocks, kv_heads, block_size, dim]
  const T* values;
  int64_t block_size;
  HeadShape shape;
  T* out;  // [T, heads * dim], rows `out_stride` apart
  int64_t out_stride;

  const T* at(const T* cache, int32_t block, int64_t kv_head, int64_t offset) const {
    return cache + ((block * shape.kv_heads + kv_head) * block_size + offset) * shape.dim;
  }
};

// What is kept of each thread's or segment's work between steps.
struct AttentionScratch {
  Buffer<float> partials;  // [plan.tokens, heads, dim + 2]: weighted sum, maximum, sum of weights
};

template <typename T>
void attend(const AttentionInputs<T>& in, const AttentionOptions& options,
            const AttentionPlan& plan, AttentionScratch& scratch, bool use_amx, Team& team);

// Where a query's result goes: divided, to `out`, or undivided, to its partial.
template <typename T>
void finish_row(const AttentionInputs<T>& in, const AttentionOptions& options,
                const AttentionPlan& plan, const Segment& segment, float* partials, int64_t query,
                int64_t head, const float* sum, float maximum, float weight) {
  const int64_t dim = in.shape.dim;
  if (segment.partial) {
    float* partial = partials + (query * in.shape.heads + head) * (dim + 2);
    std::copy_n(sum, dim, partial);
    partial[dim] = maximum;
    partial[dim + 1] = weight;
    return;
  }
  if (options.sinks != nullptr) weight += std::exp(options.sinks[head] - maximum);
  T* out = in.out + plan.tokens[query] * in.out_stride + head * dim;
  const float factor = 1.0f / weight;
  for (int64_t i = 0; i < dim; ++i) out[i] = from_float<T>(sum[i] * factor);
}

// First key of a segment that any of its queries sees, a multiple of 16 past its low end.
inline int64_t first_visible(const AttentionPlan& plan, const Segment& segment, int64_t window) {
  if (window == 0) return segment.low;
  int64_t earliest = plan.positions[segment.first];
  for (int64_t i = 1; i < segment.count; ++i) {
    earliest = std::min(earliest, plan.positions[segment.first + i]);
  }
  const int64_t skipped = earliest - window + 1 - segment.low;
  return skipped <= 0 ? segment.low : segment.low + skipped / 16 * 16;
}

// Defined where the build has AMX. Meanwhile asks the memory for what `next` will read first, if there
// is a next one.
void attend_segment_amx(const AttentionInputs<bf16>& in, const AttentionOptions& options,
                        const AttentionPlan& plan, const Segment& segment, int64_t kv_head,
                        float* partials, const Segment* next, int64_t next_head);

}  // namespace shoal
