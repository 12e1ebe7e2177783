#include "attention.h"

#include <limits>
#include <memory>

#include "amx.h"

namespace shoal {

namespace {

constexpr int64_t kTileTokens = 32;
constexpr float kHidden = -std::numeric_limits<float>::infinity();

// The rows of one segment and KV head: query q and head g of the group are row q * group + g.
template <typename T>
class VectorSegment {
 public:
  VectorSegment(const AttentionInputs<T>& in, const AttentionOptions& options,
                const AttentionPlan& plan, const Segment& segment, int64_t kv_head)
      : in_(in), options_(options), plan_(plan), segment_(segment), kv_head_(kv_head),
        group_(in.shape.heads / in.shape.kv_heads), dim_(in.shape.dim),
        rows_(segment.count * group_), queries_(rows_ * dim_), sums_(rows_ * dim_, 0.0f),
        maxima_(rows_, kHidden), weights_(rows_, 0.0f), keys_(kTileTokens * dim_),
        values_(kTileTokens * dim_) {
    for (int64_t row = 0; row < rows_; ++row) {
      const T* query = in.queries + plan.tokens[segment.first + row / group_] * in.shape.heads *
                                        dim_ + (kv_head * group_ + row % group_) * dim_;
      for (int64_t i = 0; i < dim_; ++i) {
        queries_[row * dim_ + i] = to_float(query[i]) * options.scale;
      }
    }
  }

  void run(float* partials) {
    for (int64_t from = first_visible(plan_, segment_, options_.window); from < segment_.high;
         from += kTileTokens) {
      const int64_t count = std::min(kTileTokens, segment_.high - from);
      load(from, count);
      for (int64_t row = 0; row < rows_; ++row) add(row, from, count);
    }
    for (int64_t row = 0; row < rows_; ++row) {
      finish_row(in_, options_, plan_, segment_, partials, segment_.first + row / group_,
                 kv_head_ * group_ + row % group_, &sums_[row * dim_], maxima_[row],
                 weights_[row]);
    }
  }

 private:
  void load(int64_t from, int64_t count) {
    for (int64_t t = 0; t < count; ++t) {
      const int32_t block = segment_.table[(from + t) / in_.block_size];
      const int64_t offset = (from + t) % in_.block_size;
      const T* key = in_.at(in_.keys, block, kv_head_, offset);
      const T* value = in_.at(in_.values, block, kv_head_, offset);
      for (int64_t i = 0; i < dim_; ++i) {
        keys_[t * dim_ + i] = to_float(key[i]);
        values_[t * dim_ + i] = to_float(value[i]);
      }
    }
  }

  void add(int64_t row, int64_t from, int64_t count) {
    const int64_t position = plan_.positions[segment_.first + row / group_];
    const int64_t first =
        options_.window == 0 ? 0 : std::max<int64_t>(0, position - options_.window + 1 - from);
    const int64_t end = std::min(count, position + 1 - from);
    if (first >= end) return;
    float scores[kTileTokens];
    const float* query = &queries_[row * dim_];
    float largest = kHidden;
    for (int64_t t = first; t < end; ++t) {
      const float* key = &keys_[t * dim_];
      float score = 0.0f;
#pragma omp simd reduction(+ : score)
      for (int64_t i = 0; i < dim_; ++i) score += query[i] * key[i];
      if (options_.softcap != 0.0f) {
        score = options_.softcap * fast_tanh(score / options_.softcap);
      }
      scores[t] = score;
      largest = std::max(largest, score);
    }
    rescale(row, largest);
    float* sum = &sums_[row * dim_];
    for (int64_t t = first; t < end; ++t) {
      const float weight = fast_exp(scores[t] - maxima_[row]);
      weights_[row] += weight;
      const float* value = &values_[t * dim_];
#pragma omp simd
      for (int64_t i = 0; i < dim_; ++i) sum[i] += weight * value[i];
    }
  }

  void rescale(int64_t row, float largest) {
    if (largest <= maxima_[row]) return;
    const float factor = maxima_[row] == kHidden ? 0.0f : fast_exp(maxima_[row] - largest);
    maxima_[row] = largest;
    weights_[row] *= factor;
    float* sum = &sums_[row * dim_];
#pragma omp simd
    for (int64_t i = 0; i < dim_; ++i) sum[i] *= factor;
  }

  const AttentionInputs<T>& in_;
  const AttentionOptions& options_;
  const AttentionPlan& plan_;
  const Segment& segment_;
  const int64_t kv_head_, group_, dim_, rows_;
  std::vector<float> queries_, sums_, maxima_, weights_, keys_, values_;
};

template <typename T>
void merge_row(const AttentionInputs<T>& in, const AttentionOptions& options,
               const AttentionPlan& plan, const float* partials, int64_t index, int64_t head) {
  const int64_t dim = in.shape.dim;
  const int64_t begin = plan.merge_starts[index], end = plan.merge_starts[index + 1];
  const auto partial = [&](int64_t i) {
    return partials + (plan.merge_slots[i] * in.shape.heads + head) * (dim + 2);
  };
  float maximum = options.sinks == nullptr ? kHidden : options.sinks[head];
  for (int64_t i = begin; i < end; ++i) maximum = std::max(maximum, partial(i)[dim]);
  float weight = options.sinks == nullptr ? 0.0f : std::exp(options.sinks[head] - maximum);
  T* out = in.out + plan.tokens[plan.merge_slots[begin]] * in.out_stride + head * dim;
  // Weights first, so that each part of the result is added up in a register.
  static thread_local std::vector<float> factors;
  factors.assign(end - begin, 0.0f);
  for (int64_t i = begin; i < end; ++i) {
    const float* part = partial(i);
    // A segment outside of the query's window has no weight, and its sum is zero.
    if (part[dim] != kHidden) factors[i - begin] = fast_exp(part[dim] - maximum);
    weight += factors[i - begin] * part[dim + 1];
  }
  for (float& factor : factors) factor /= weight;
  for (int64_t j = 0; j < dim; j += 16) {
    float sum[16] = {};
    for (int64_t i = begin; i < end; ++i) {
      const float* part = partial(i) + j;
      const float factor = factors[i - begin];
      for (int64_t k = 0; k < 16; ++k) sum[k] += factor * part[k];
    }
    for (int64_t k = 0; k < 16; ++k) out[j + k] = from_float<T>(sum[k]);
  }
}

template <typename T>
void attend_segment(const AttentionInputs<T>& in, const AttentionOptions& options,
                    const AttentionPlan& plan, const Segment& segment, int64_t kv_head,
                    float* partials) {
  VectorSegment<T>(in, options, plan, segment, kv_head).run(partials);
}

// One task of the plan, with whatever unit its type can use.
template <typename T>
class Runner {
 public:
  explicit Runner(bool) {}
  void run(const AttentionInputs<T>& in, const AttentionOptions& options,
           const AttentionPlan& plan, const Segment& segment, int64_t kv_head, float* partials,
           const Segment*, int64_t) {
    attend_segment(in, options, plan, segment, kv_head, partials);
  }
};

#if SHOAL_AMX
template <>
class Runner<bf16> {
 public:
  explicit Runner(bool use_amx) {
    if (use_amx) tiles_ = std::make_unique<Tiles>();
  }
  void run(const AttentionInputs<bf16>& in, const AttentionOptions& options,
           const AttentionPlan& plan, const Segment& segment, int64_t kv_head, float* partials,
           const Segment* next, int64_t next_head) {
    if (tiles_ != nullptr) {
      attend_segment_amx(in, options, plan, segment, kv_head, partials, next, next_head);
    } else {
      attend_segment(in, options, plan, segment, kv_head, partials);
    }
  }

 private:
  std::unique_ptr<Tiles> tiles_;
};
#endif

}  // namespace

template <typename T>
void attend(const AttentionInputs<T>& in, const AttentionOptions& options,
            const AttentionPlan& plan, AttentionScratch& scratch, bool use_amx, Team& team) {
  const int64_t heads = in.shape.heads, kv_heads = in.shape.kv_heads;
  const auto queries = static_cast<int64_t>(plan.tokens.size());
  float* partials = scratch.partials.reserve(queries * heads * (in.shape.dim + 2));
  const int64_t tasks = static_cast<int64_t>(plan.segments.size()) * kv_heads;
  const int64_t merges = (static_cast<int64_t>(plan.merge_starts.size()) - 1) * heads;
  team.share(tasks, [&](Claims& claims) {
    Runner<T> runner(use_amx);
    const auto segment = [&](int64_t task) { return &plan.segments[task / kv_heads]; };
    while (claims.take()) {
      // Sequences lie scattered: each segment would begin with waiting for the memory.
      const Segment* next = claims.has_upcoming() ? segment(claims.upcoming()) : nullptr;
      runner.run(in, options, plan, *segment(claims.task()), claims.task() % kv_heads, partials,
                 next, claims.upcoming() % kv_heads);
    }
  });
  team.each(merges, 64, [&](int64_t task) {
    merge_row(in, options, plan, partials, task / heads, task % heads);
  });
}

template void attend<float>(const AttentionInputs<float>&, const AttentionOptions&,
                            const AttentionPlan&, AttentionScratch&, bool, Team&);
template void attend<bf16>(const AttentionInputs<bf16>&, const AttentionOptions&,
                           const AttentionPlan&, AttentionScratch&, bool, Team&);

}  // namespace shoal
