#include "routing.h"

#include "common.h"

namespace shoal {

void Routing::reserve(int64_t rows, int64_t experts, int64_t per_row) {
  experts_ = experts;
  per_row_ = per_row;
  if (const auto size = static_cast<size_t>(rows * per_row); chosen_.size() < size) {
    chosen_.resize(size);
    weights_.resize(size);
  }
}

void Routing::choose(int64_t row, const float* logits, bool normalized) {
  int64_t* chosen = chosen_.data() + row * per_row_;
  float* weights = weights_.data() + row * per_row_;
  // Kept in falling order. No comparison with a NaN holds, so one may displace nothing.
  int64_t found = 0;
  for (int64_t expert = 0; expert < experts_; ++expert) {
    const float logit = logits[expert];
    if (found == per_row_ && !(logit > logits[chosen[found - 1]])) continue;
    int64_t place = found < per_row_ ? found++ : found - 1;
    for (; place > 0 && logit > logits[chosen[place - 1]]; --place) {
      chosen[place] = chosen[place - 1];
    }
    chosen[place] = expert;
  }
  const float largest = logits[chosen[0]];
  float all = 0.0f, own = 0.0f;
#pragma omp simd reduction(+ : all)
  for (int64_t expert = 0; expert < experts_; ++expert) all += fast_exp(logits[expert] - largest);
  for (int64_t i = 0; i < per_row_; ++i) {
    weights[i] = fast_exp(logits[chosen[i]] - largest) / all;
    own += weights[i];
  }
  if (!normalized) return;
  for (int64_t i = 0; i < per_row_; ++i) weights[i] /= own;
}

void Routing::group(int64_t rows) {
  const int64_t count = rows * per_row_;
  starts_.assign(experts_ + 1, 0);
  for (int64_t i = 0; i < count; ++i) ++starts_[chosen_[i] + 1];
  used_.clear();
  for (int64_t expert = 0; expert < experts_; ++expert) {
    if (starts_[expert + 1] != 0) used_.push_back(expert);
    starts_[expert + 1] += starts_[expert];
  }
  next_ = starts_;
  places_.resize(count);
  for (int64_t i = 0; i < count; ++i) places_[next_[chosen_[i]]++] = {i / per_row_, weights_[i]};
}

}  // namespace shoal
