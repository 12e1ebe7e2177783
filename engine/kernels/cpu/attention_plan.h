// Who attends to what in a step, cut into pieces that threads take one by one.
//
// Invariant: every (query, key) pair that may see each other is in exactly one segment. A query in
// one segment only gets its result from there; one in several has a partial result in each, merged
// by their log-sum-exp (https://arxiv.org/abs/1805.02867).
//
// Sequences that begin with the same blocks are attended to together there: their queries become the
// rows of one product, and shared keys and values are read once for all of them.

#pragma once

#include <vector>

#include "common.h"

namespace shoal {

struct BatchView {
  const int64_t* query_starts;  // [S + 1]
  const int64_t* context_lens;  // [S]
  const int32_t* block_tables;  // [S, table_stride]
  int64_t table_stride;
  int64_t sequences;
  int64_t block_size;
};

struct Segment {
  int64_t first, count;   // its queries: plan.tokens[first : first + count]
  const int32_t* table;   // blocks of any of its sequences
  int64_t low, high;      // keys [low, high) of that sequence
  bool partial;
};

struct AttentionPlan {
  std::vector<Segment> segments;
  std::vector<int64_t> tokens;     // row in the packed batch, for each query of each segment
  std::vector<int64_t> positions;  // its place in its sequence
  std::vector<int64_t> merge_starts;  // [M + 1] into `merge_slots`
  std::vector<int64_t> merge_slots;   // places in `tokens` that belong to one row
};

struct PlanShape {
  int64_t rows_per_query;  // query heads that share a KV head
  int64_t kv_heads;
  int threads;
};

AttentionPlan plan_attention(const BatchView& batch, const PlanShape& shape);

}  // namespace shoal
