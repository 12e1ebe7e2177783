// Which rows go to which experts, and how much each counts.
//
// Invariant: every row has `per_row` places, of as many experts. Once grouped, an expert's places lie
// side by side, in the order of their rows.

#pragma once

#include <cstdint>
#include <vector>

namespace shoal {

// A row at one of its experts.
struct Place {
  int64_t row;
  float weight;
};

class Routing {
 public:
  // For up to `rows` rows.
  void reserve(int64_t rows, int64_t experts, int64_t per_row);

  // Takes the experts with the largest of `logits` [experts], of equals the first ones. Their weights
  // are what the softmax over all experts gives them, `normalized`: divided by their sum. Threads may
  // do so for different rows at once. A NaN among the logits makes the row's weights NaN.
  void choose(int64_t row, const float* logits, bool normalized);

  // Of rows [0, rows), for each of which experts are chosen.
  void group(int64_t rows);

  int64_t count() const { return static_cast<int64_t>(places_.size()); }
  const Place& operator[](int64_t place) const { return places_[place]; }
  // Experts that any row goes to, by number.
  const std::vector<int64_t>& used() const { return used_; }
  // Places of an expert: [first(expert), first(expert + 1)).
  int64_t first(int64_t expert) const { return starts_[expert]; }
  int64_t count_of(int64_t expert) const { return starts_[expert + 1] - starts_[expert]; }

 private:
  int64_t experts_ = 0, per_row_ = 0;
  std::vector<int64_t> chosen_;  // [rows, per_row]
  std::vector<float> weights_;   // [rows, per_row]
  std::vector<Place> places_;
  std::vector<int64_t> starts_, next_, used_;
};

}  // namespace shoal
