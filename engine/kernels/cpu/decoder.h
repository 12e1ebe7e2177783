// One decoder-only transformer, run a step at a time.
//
// Invariant: everything that differs between models is a number, a switch or a weight that is there
// or not; no model is known by name. A step touches nothing outside but the caches it is given.

#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <array>
#include <chrono>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "arena.h"
#include "attention.h"
#include "experts.h"
#include "linear.h"

namespace shoal {

// Fewest rows a thread needs to go through a layer on its own: it reads all of the weights for them.
constexpr int64_t kFewestSpanRows = 128;
// Rows whose activations stay in a core's L2 cache.
constexpr int64_t kMostSpanRows = 256;

struct Layer {
  Linear qkv, output, gate_up, down;
  // float32, undefined where a model has none.
  at::Tensor input_norm, attention_output_norm, mlp_norm, mlp_output_norm, query_norm, key_norm;
  ExpertLayer experts;  // in place of gate_up and down, or none
  int64_t window = 0;
};

struct DecoderShape {
  int64_t hidden, intermediate, vocab;
  HeadShape heads;
  float eps, embedding_scale, attention_scale, attention_softcap, final_softcap;
  Activation activation;
};

// The batch of one step; see engine/kernels/batch.py.
struct Step {
  at::Tensor token_ids, cos, sin, slot_blocks, slot_offsets, query_starts, context_lens,
      block_tables, rows;
  std::vector<at::Tensor> keys, values;
};

enum class Part {
  kEmbed,
  kNorm,
  kQkv,
  kRotary,
  kAttention,
  kOutput,
  kRouter,
  kGateUp,
  kDown,
  kHead,
  kCount
};

// Seconds spent in each part.
class PartClock {
 public:
  // `share`: what a second of this thread counts.
  void start(double share = 1.0) {
    last_ = std::chrono::steady_clock::now();
    share_ = share;
  }

  // What has passed since the last call went into `part`.
  void note(Part part) {
    const auto now = std::chrono::steady_clock::now();
    const double passed = std::chrono::duration<double>(now - last_).count();
    seconds_[static_cast<size_t>(part)] += passed * share_;
    last_ = now;
  }

  double take(size_t part) { return std::exchange(seconds_[part], 0.0); }

 private:
  std::chrono::steady_clock::time_point last_;
  double share_ = 1.0;
  std::array<double, static_cast<size_t>(Part::kCount)> seconds_{};
};

// Rows of a step.
struct Span {
  int64_t first, count;
};

// Memory of one span's way through a part of a layer: what a product reads (padded to whole tiles),
// and the rest by its content. Bytes, since the type differs.
struct Workspace {
  Buffer<float> branch;
  Buffer<uint8_t> input, qkv, activated;
  PartClock clock;
};

class Decoder : public torch::CustomClassHolder {
 public:
  Decoder(const c10::Dict<std::string, double>& numbers, std::vector<int64_t> windows,
          const std::string& activation, bool use_amx);

  // Takes over `weight`, of the model's dtype; a name that is not known raises.
  void set_weight(const std::string& name, const at::Tensor& weight);

  // Logits, float32 [rows, vocab]. `tensors`: token_ids, slot_blocks, slot_offsets, query_starts,
  // context_lens, rows (int64), block_tables (int32), cos, sin (float32).
  at::Tensor forward(const c10::Dict<std::string, at::Tensor>& tensors,
                     std::vector<at::Tensor> keys, std::vector<at::Tensor> values);

  // The largest logit of each row, NaN if there is one, and its first place.
  std::tuple<at::Tensor, at::Tensor> row_max(const at::Tensor& logits);

  // Seconds spent in each part since the last call; where threads go through a layer each on its
  // own, the seconds of all over their number.
  c10::Dict<std::string, double> take_timings();

 private:
  template <typename T>
  at::Tensor run(const Step& step);
  // As many threads as torch has been told to use.
  void gather_team();
  template <typename Body>
  void spans(int64_t tokens, const Body& body);
  template <typename T>
  void embed(const Step& step, Span span, Team& team);
  template <typename T>
  void before_attention(const Step& step, int64_t index, Span span, Workspace& memory, Team& team);
  template <typename T>
  void attention(const Step& step, int64_t index, const AttentionPlan& plan);
  template <typename T>
  void after_attention(int64_t index, Span span, Workspace& memory, Team& team);
  template <typename T>
  void add_experts(int64_t index, int64_t rows);
  template <typename T>
  void keep_rows(const at::Tensor& rows);
  at::Tensor take_logits(int64_t rows);
  template <typename T>
  at::Tensor head(int64_t rows, Workspace& memory);
  template <typename T>
  void add_product(const Linear& weight, const T* x, int64_t stride, float* hidden, int64_t rows,
                   const at::Tensor& norm, Workspace& memory, Team& team);
  void add_normed(float* branch, const at::Tensor& norm, float* hidden, int64_t rows, Team& team);
  template <typename T>
  void normed_input(const at::Tensor& norm, const float* hidden, int64_t rows, Workspace& memory,
                    Team& team);
  template <typename T, typename Store>
  void multiply(const Linear& weight, const T* x, int64_t stride, int64_t rows, Team& team,
                const Store& store);
  template <typename T>
  void gate_up(const Linear& weight, int64_t rows, Workspace& memory, Team& team);

  void set_layer_weight(Layer& layer, const std::string& name, const at::Tensor& weight);

  DecoderShape shape_;
  Arena arena_;
  std::vector<Layer> layers_;
  Linear embedding_, head_;
  at::Tensor final_norm_;
  bool use_amx_;
  std::unique_ptr<Team> team_;
  at::ScalarType dtype_ = at::kFloat;

  // A step's residual stream, queries and what attention gave; bytes, since their type differs.
  Buffer<float> hidden_, kept_;
  Buffer<uint8_t> queries_, context_;
  AttentionScratch scratch_;
  at::Tensor logits_;
  Mixture mixture_;
  std::vector<Workspace> workspaces_;  // one a thread
  Team alone_{1};
  PartClock clock_;  // of what all threads do together
};

}  // namespace shoal
