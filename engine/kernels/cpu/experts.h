// Layers of experts: a router and many gated MLPs, of which each row takes a few
// (https://arxiv.org/abs/1701.06538).
//
// Invariant: with packed weights what a row gets depends on that row alone, neither on the threads nor
// on the rows beside it: its experts are added by number, each column by one thread. (Plain ones are
// multiplied by torch, which rounds by the number of rows and threads.)
//
// A layer is all rows of a step together, so that an expert's weights are read once. `route` alone
// may be called for parts of the rows by several threads at once.

#pragma once

#include <string>
#include <vector>

#include "linear.h"
#include "ops.h"
#include "routing.h"

namespace shoal {

struct ExpertShape {
  int64_t count, per_row, hidden, intermediate;
  bool normalized;
  Activation activation;
};

struct ExpertLayer {
  Linear router;  // plain: in float32
  std::vector<Linear> gate_up, down;

  bool defined() const { return !down.empty(); }

  // Takes over `weight`, if it is one of experts: router [count, hidden],
  // expert_gate_up [count, 2 * intermediate, hidden], expert_down [count, hidden, intermediate].
  bool set(const std::string& name, const at::Tensor& weight, const ExpertShape& shape,
           bool use_amx, Arena& arena);
};

// The rows of a step on their way through a layer, and the memory for it: `reserve` once a step, then
// for each layer `route`, `gather`, `gate_up`, `add_down`. T is the dtype of what products read.
class Mixture {
 public:
  explicit Mixture(const ExpertShape& shape) : shape_(shape) {}

  const ExpertShape& shape() const { return shape_; }

  template <typename T>
  void reserve(int64_t rows);

  // Chooses the experts of rows [first, first + rows), and keeps their inputs x [rows, hidden], laid
  // out as for `gemm`.
  template <typename T>
  void route(const ExpertLayer& layer, const T* x, int64_t first, int64_t rows, Team& team);

  // Puts the inputs of rows [0, rows) side by side for each expert.
  template <typename T>
  void gather(int64_t rows, Team& team);

  template <typename T>
  void gate_up(const ExpertLayer& layer, Team& team);

  // Adds to out [rows, hidden] what the experts of each row give, weighted.
  template <typename T>
  void add_down(const ExpertLayer& layer, float* out, Team& team);

 private:
  ExpertShape shape_;
  Routing routing_;
  Buffer<float> logits_;                        // [rows, count]
  Buffer<uint8_t> input_;                       // [rows, hidden], padded
  Buffer<uint8_t> gathered_, activated_;        // [places, hidden or intermediate], padded
  Team alone_{1};
};

}  // namespace shoal
