#include "attention_plan.h"

#include <algorithm>
#include <unordered_map>

namespace shoal {

namespace {

// Rows of one segment's product: enough to be worth turning the values for.
constexpr int64_t kSegmentRows = 192;
// Shared keys below this are not worth a merge.
constexpr int64_t kFewestSharedTokens = 64;
constexpr int64_t kFewestSplitTokens = 128;

class Planner {
 public:
  Planner(const BatchView& batch, const PlanShape& shape) : batch_(batch), shape_(shape) {
    queries_per_segment_ = std::max<int64_t>(1, kSegmentRows / shape.rows_per_query);
  }

  AttentionPlan plan() {
    std::vector<int64_t> decodes;
    for (int64_t s = 0; s < batch_.sequences; ++s) {
      if (batch_.query_starts[s + 1] - batch_.query_starts[s] == 1) {
        decodes.push_back(s);
      } else {
        add_prefill(s);
      }
    }
    split_tokens_ = split_length(static_cast<int64_t>(decodes.size()));
    share(decodes, 0);
    find_merges();
    // The longest first, so that no thread is left alone with one at the end.
    std::stable_sort(plan_.segments.begin(), plan_.segments.end(),
                     [](const Segment& a, const Segment& b) { return cost(a) > cost(b); });
    return std::move(plan_);
  }

 private:
  static int64_t cost(const Segment& segment) {
    return segment.count * (segment.high - segment.low);
  }

  const int32_t* table(int64_t s) const { return batch_.block_tables + s * batch_.table_stride; }

  void add_prefill(int64_t s) {
    const int64_t start = batch_.query_starts[s], end = batch_.query_starts[s + 1];
    const int64_t shift = batch_.context_lens[s] - end;
    for (int64_t row = start; row < end; row += queries_per_segment_) {
      const int64_t last = std::min(row + queries_per_segment_, end);
      open(last - row, table(s), 0, last + shift);
      for (int64_t token = row; token < last; ++token) add_query(token, token + shift);
    }
  }

  // Keys of one piece when there are too few decoding sequences to keep all threads busy.
  int64_t split_length(int64_t decodes) const {
    const int64_t tasks = std::max<int64_t>(1, decodes * shape_.kv_heads);
    const int64_t wanted = (2 * shape_.threads + tasks - 1) / tasks;
    int64_t longest = 1;
    for (int64_t s = 0; s < batch_.sequences; ++s) {
      longest = std::max(longest, batch_.context_lens[s]);
    }
    const int64_t length = round_up((longest + wanted - 1) / wanted, 32);
    return std::max(length, kFewestSplitTokens);
  }

  // Plans `group`, whose tables are equal up to `block`, from there on.
  void share(const std::vector<int64_t>& group, int64_t block) {
    std::unordered_map<int32_t, std::vector<int64_t>> by_next;
    std::vector<int32_t> order;
    for (int64_t s : group) {
      const int64_t used = (batch_.context_lens[s] + batch_.block_size - 1) / batch_.block_size;
      if (block >= used) continue;
      auto& same = by_next[table(s)[block]];
      if (same.empty()) order.push_back(table(s)[block]);
      same.push_back(s);
    }
    for (int32_t id : order) {
      const std::vector<int64_t>& same = by_next[id];
      const int64_t end = same.size() > 1 ? common_end(same, block) : block;
      const bool worth = (end - block) * batch_.block_size >= kFewestSharedTokens;
      if (worth) {
        add_shared(same, block, end);
        share(same, end);
      } else {
        for (int64_t s : same) add_decode(s, block * batch_.block_size);
      }
    }
  }

  // Whole blocks that all of `group` have in common.
  int64_t common_end(const std::vector<int64_t>& group, int64_t block) const {
    int64_t end = batch_.table_stride;
    const int32_t* first = table(group[0]);
    for (int64_t s : group) {
      end = std::min(end, batch_.context_lens[s] / batch_.block_size);
      int64_t same = block;
      while (same < end && table(s)[same] == first[same]) ++same;
      end = same;
    }
    return end;
  }

  void add_shared(const std::vector<int64_t>& group, int64_t block, int64_t end) {
    const auto count = static_cast<int64_t>(group.size());
    for (int64_t i = 0; i < count; i += queries_per_segment_) {
      const int64_t last = std::min(i + queries_per_segment_, count);
      open(last - i, table(group[i]), block * batch_.block_size, end * batch_.block_size);
      for (int64_t j = i; j < last; ++j) add_decode_query(group[j]);
    }
  }

  void add_decode(int64_t s, int64_t low) {
    const int64_t length = batch_.context_lens[s];
    for (int64_t from = low; from < length; from += split_tokens_) {
      open(1, table(s), from, std::min(from + split_tokens_, length));
      add_decode_query(s);
    }
  }

  void open(int64_t count, const int32_t* table, int64_t low, int64_t high) {
    plan_.segments.push_back(
        {static_cast<int64_t>(plan_.tokens.size()), count, table, low, high, false});
  }

  void add_decode_query(int64_t s) {
    add_query(batch_.query_starts[s], batch_.context_lens[s] - 1);
  }

  void add_query(int64_t token, int64_t position) {
    plan_.tokens.push_back(token);
    plan_.positions.push_back(position);
  }

  // A segment is partial if any of its queries has others; then all of its queries are merged.
  void find_merges() {
    std::vector<std::vector<int64_t>> slots(batch_.query_starts[batch_.sequences]);
    for (size_t slot = 0; slot < plan_.tokens.size(); ++slot) {
      slots[plan_.tokens[slot]].push_back(static_cast<int64_t>(slot));
    }
    std::vector<bool> merged(slots.size(), false);
    for (Segment& segment : plan_.segments) {
      for (int64_t i = segment.first; i < segment.first + segment.count; ++i) {
        segment.partial |= slots[plan_.tokens[i]].size() > 1;
      }
      for (int64_t i = segment.first; segment.partial && i < segment.first + segment.count; ++i) {
        merged[plan_.tokens[i]] = true;
      }
    }
    plan_.merge_starts.push_back(0);
    for (size_t token = 0; token < slots.size(); ++token) {
      if (!merged[token]) continue;
      plan_.merge_slots.insert(plan_.merge_slots.end(), slots[token].begin(), slots[token].end());
      plan_.merge_starts.push_back(static_cast<int64_t>(plan_.merge_slots.size()));
    }
  }

  const BatchView& batch_;
  const PlanShape& shape_;
  int64_t queries_per_segment_ = 1, split_tokens_ = 1;
  AttentionPlan plan_;
};

}  // namespace

AttentionPlan plan_attention(const BatchView& batch, const PlanShape& shape) {
  return Planner(batch, shape).plan();
}

}  // namespace shoal
