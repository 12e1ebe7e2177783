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
#include <vector>

#include "arena.h"
#include "attention.h"
#include "gemm.h"

namespace shoal {

// A matrix [n, k] that inputs [*, k] are multiplied with, transposed. One of the two forms is there.
struct Linear {
  at::Tensor plain, packed;
  at::Tensor bias;  // float32 [n]; for paired packing none
  int64_t n = 0, k = 0;
};

struct Layer {
  Linear qkv, output, gate_up, down;
  // float32, undefined where a model has none.
  at::Tensor input_norm, attention_output_norm, mlp_norm, mlp_output_norm, query_norm, key_norm;
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

enum class Part { kEmbed, kNorm, kQkv, kRotary, kAttention, kOutput, kGateUp, kDown, kHead, kCount };

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

  // Seconds spent in each part since the last call.
  c10::Dict<std::string, double> take_timings();

 private:
  template <typename T>
  at::Tensor run(const Step& step);
  template <typename T>
  void embed(const Step& step, int64_t tokens);
  template <typename T>
  void attention_block(const Step& step, int64_t index, const AttentionPlan& plan,
                       int64_t tokens);
  template <typename T>
  void mlp_block(const Layer& layer, int64_t tokens);
  template <typename T>
  void keep_rows(const at::Tensor& rows);
  template <typename T>
  at::Tensor head(int64_t rows);
  template <typename T>
  void add_product(const Linear& weight, const T* x, int64_t stride, int64_t rows,
                   const at::Tensor& norm);
  template <typename T>
  void normed_input(const at::Tensor& norm, int64_t rows);
  template <typename T, typename Store>
  void multiply(const Linear& weight, const T* x, int64_t stride, int64_t rows,
                const Store& store);
  template <typename T>
  void gate_up(const Linear& weight, int64_t rows);

  Linear make_linear(const at::Tensor& weight, bool paired);
  void set_layer_weight(Layer& layer, const std::string& name, const at::Tensor& weight);
  void note(Part part);

  DecoderShape shape_;
  Arena arena_;
  std::vector<Layer> layers_;
  Linear embedding_, head_;
  at::Tensor final_norm_;
  bool use_amx_;
  std::unique_ptr<Team> team_;
  at::ScalarType dtype_ = at::kFloat;

  // Memory of a step: the residual stream, what a product reads (padded to whole tiles), and the
  // rest by its content. Bytes, since T differs.
  Buffer<float> hidden_, branch_, kept_;
  Buffer<uint8_t> input_, qkv_, queries_, context_, activated_;
  AttentionScratch scratch_;

  std::chrono::steady_clock::time_point last_;
  std::array<double, static_cast<size_t>(Part::kCount)> seconds_{};
};

}  // namespace shoal
