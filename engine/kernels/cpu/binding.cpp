// What Python sees: the Decoder, and each kernel by itself for tests.
//
// Invariant: tensors are checked here, since a kernel believes what it is told.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <map>

#include "decoder.h"

namespace shoal {

namespace {

Activation parse_activation(const std::string& name) {
  static const std::map<std::string, Activation> kinds{{"silu", Activation::kSilu},
                                                       {"gelu", Activation::kGelu},
                                                       {"gelu_tanh", Activation::kGeluTanh}};
  const auto found = kinds.find(name);
  TORCH_CHECK(found != kinds.end(), "unknown activation ", name);
  return found->second;
}

template <typename T>
at::Tensor attention(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values,
                     const BatchView& batch, const AttentionOptions& options, bool use_amx) {
  const HeadShape shape{query.size(1), keys.size(1), query.size(2)};
  Team team(at::get_num_threads());
  const AttentionPlan plan =
      plan_attention(batch, {shape.heads / shape.kv_heads, shape.kv_heads, team.count()});
  at::Tensor out = at::empty_like(query);
  AttentionScratch scratch;
  const AttentionInputs<T> inputs{static_cast<const T*>(query.const_data_ptr()),
                                  static_cast<const T*>(keys.const_data_ptr()),
                                  static_cast<const T*>(values.const_data_ptr()),
                                  keys.size(2),
                                  shape,
                                  static_cast<T*>(out.mutable_data_ptr()),
                                  shape.heads * shape.dim};
  attend(inputs, options, plan, scratch, use_amx, team);
  return out;
}

// query [T, H, D]; window 0 and softcap 0: none.
at::Tensor paged_attention(const at::Tensor& query, const at::Tensor& keys,
                           const at::Tensor& values, const at::Tensor& query_starts,
                           const at::Tensor& context_lens, const at::Tensor& block_tables,
                           double scale, int64_t window, double softcap,
                           const std::optional<at::Tensor>& sinks, bool use_amx) {
  TORCH_CHECK(query.is_contiguous() && keys.is_contiguous() && values.is_contiguous(),
              "paged_attention needs contiguous tensors");
  TORCH_CHECK(query.dtype() == keys.dtype() && query.size(2) % 16 == 0,
              "paged_attention needs one dtype and a head dim that is a multiple of 16");
  const BatchView batch{static_cast<const int64_t*>(query_starts.const_data_ptr()),
                        static_cast<const int64_t*>(context_lens.const_data_ptr()),
                        static_cast<const int32_t*>(block_tables.const_data_ptr()),
                        block_tables.size(1), context_lens.numel(), keys.size(2)};
  const AttentionOptions options{
      static_cast<float>(scale), window, static_cast<float>(softcap),
      sinks.has_value() ? static_cast<const float*>(sinks->const_data_ptr()) : nullptr};
  if (query.scalar_type() == at::kFloat) {
    return attention<float>(query, keys, values, batch, options, false);
  }
  TORCH_CHECK(query.scalar_type() == at::kBFloat16, "paged_attention: float32 or bfloat16");
  return attention<bf16>(query, keys, values, batch, options, use_amx && amx_usable());
}

// x [M, K] * weight [N, K]^T in float32, both bfloat16, by the tile unit.
at::Tensor packed_linear(const at::Tensor& x, const at::Tensor& weight) {
  const int64_t rows = x.size(0), n = weight.size(0), k = weight.size(1);
  at::Tensor out = at::empty({rows, n}, x.options().dtype(at::kFloat));
#if SHOAL_AMX
  TORCH_CHECK(amx_usable(), "no tile unit");
  Arena arena;
  const at::Tensor packed = pack(weight.contiguous(), false, arena);
  const int64_t stride = round_up(k, kStep);
  Buffer<bf16> input;
  bf16* in = input.reserve(round_up(rows, kBlockRows) * stride);
  for (int64_t row = 0; row < rows; ++row) {
    std::copy_n(static_cast<const bf16*>(x.const_data_ptr()) + row * k, k, in + row * stride);
  }
  auto* result = static_cast<float*>(out.mutable_data_ptr());
  Team team(at::get_num_threads());
  gemm(in, stride, rows, static_cast<const bf16*>(packed.const_data_ptr()),
       packed_blocks(n, false), k, team,
       [&](int64_t row, int64_t block, const float* values) {
         const int64_t column = block * kBlockColumns;
         std::copy_n(values, std::min(kBlockColumns, n - column), result + row * n + column);
       });
#else
  TORCH_CHECK(false, "built without the tile unit");
#endif
  return out;
}

template <typename T>
void add_experts(Mixture& mixture, const ExpertLayer& layer, const at::Tensor& x, float* out) {
  const int64_t rows = x.size(0), width = x.size(1), stride = padded(width);
  Buffer<uint8_t> memory;
  T* in = buffer<T>(memory, padded_rows(rows) * stride);
  for (int64_t row = 0; row < rows; ++row) {
    std::copy_n(data<T>(x) + row * width, width, in + row * stride);
  }
  Team team(at::get_num_threads());
  mixture.reserve<T>(rows);
  mixture.route<T>(layer, in, 0, rows, team);
  mixture.gather<T>(rows, team);
  mixture.gate_up<T>(layer, team);
  mixture.add_down<T>(layer, out, team);
}

// What a layer of experts gives each row of x [T, hidden], float32 [T, hidden]. `weights`: router,
// expert_gate_up and expert_down, see ExpertLayer.
at::Tensor experts(const at::Tensor& x, const c10::Dict<std::string, at::Tensor>& weights,
                   int64_t per_row, bool normalized, const std::string& activation,
                   bool use_amx) {
  const at::Tensor down = weights.at("expert_down");
  TORCH_CHECK(x.dim() == 2 && x.is_contiguous() && down.dim() == 3 && x.size(1) == down.size(1),
              "experts needs rows [T, hidden] and expert_down [count, hidden, intermediate]");
  TORCH_CHECK(per_row >= 1 && per_row <= down.size(0), per_row, " of ", down.size(0), " experts");
  const ExpertShape shape{down.size(0), per_row,    down.size(1),
                          down.size(2), normalized, parse_activation(activation)};
  Arena arena;
  ExpertLayer layer;
  for (const char* name : {"router", "expert_gate_up", "expert_down"}) {
    const at::Tensor weight = weights.at(name);
    TORCH_CHECK(weight.scalar_type() == x.scalar_type(), name, " is not of the rows' dtype");
    layer.set(name, weight, shape, use_amx && amx_usable(), arena);
  }
  Mixture mixture(shape);
  at::Tensor out = at::zeros(x.sizes(), x.options().dtype(at::kFloat));
  auto* result = static_cast<float*>(out.mutable_data_ptr());
  if (x.scalar_type() == at::kFloat) {
    add_experts<float>(mixture, layer, x, result);
  } else {
    TORCH_CHECK(x.scalar_type() == at::kBFloat16, "experts: float32 or bfloat16");
    add_experts<bf16>(mixture, layer, x, result);
  }
  return out;
}

ExpertShape expert_shape(const c10::Dict<std::string, double>& numbers, Activation activation) {
  const auto whole = [&](const char* name) { return static_cast<int64_t>(numbers.at(name)); };
  return {whole("num_experts"),         whole("experts_per_token"),
          whole("hidden_size"),         whole("expert_intermediate_size"),
          whole("normalized_experts") != 0, activation};
}

}  // namespace

Decoder::Decoder(const c10::Dict<std::string, double>& numbers, std::vector<int64_t> windows,
                 const std::string& activation, bool use_amx)
    : layers_(windows.size()),
      use_amx_(use_amx && amx_usable()),
      mixture_(expert_shape(numbers, parse_activation(activation))) {
  const auto number = [&](const char* name) { return numbers.at(name); };
  const auto whole = [&](const char* name) { return static_cast<int64_t>(numbers.at(name)); };
  shape_ = {whole("hidden_size"),
            whole("intermediate_size"),
            whole("vocab_size"),
            {whole("num_heads"), whole("num_kv_heads"), whole("head_dim")},
            static_cast<float>(number("rms_norm_eps")),
            static_cast<float>(number("embedding_scale")),
            static_cast<float>(number("attention_scale")),
            static_cast<float>(number("attention_softcap")),
            static_cast<float>(number("final_softcap")),
            parse_activation(activation)};
  for (size_t i = 0; i < windows.size(); ++i) layers_[i].window = windows[i];
}

void Decoder::set_weight(const std::string& name, const at::Tensor& weight) {
  if (name == "embedding") {
    dtype_ = weight.scalar_type();
    TORCH_CHECK(dtype_ == at::kFloat || dtype_ == at::kBFloat16, "float32 or bfloat16 only");
    embedding_ = make_linear(weight, false, use_amx_, arena_);
  } else if (name == "head") {
    head_ = make_linear(weight, false, use_amx_, arena_);
  } else if (name == "final_norm") {
    final_norm_ = weight.to(at::kFloat).contiguous();
  } else {
    const size_t dot = name.find('.');
    TORCH_CHECK(dot != std::string::npos, "unknown weight ", name);
    set_layer_weight(layers_.at(std::stoul(name.substr(0, dot))), name.substr(dot + 1), weight);
  }
}

void Decoder::set_layer_weight(Layer& layer, const std::string& name, const at::Tensor& weight) {
  const std::map<std::string, Linear*> linears{{"qkv", &layer.qkv},
                                               {"output", &layer.output},
                                               {"gate_up", &layer.gate_up},
                                               {"down", &layer.down}};
  const std::map<std::string, at::Tensor*> vectors{
      {"input_norm", &layer.input_norm},
      {"attention_output_norm", &layer.attention_output_norm},
      {"mlp_norm", &layer.mlp_norm},
      {"mlp_output_norm", &layer.mlp_output_norm},
      {"query_norm", &layer.query_norm},
      {"key_norm", &layer.key_norm},
      {"qkv_bias", &layer.qkv.bias},
      {"output_bias", &layer.output.bias},
      {"down_bias", &layer.down.bias}};
  if (const auto found = linears.find(name); found != linears.end()) {
    const at::Tensor bias = found->second->bias;
    *found->second = make_linear(weight, name == "gate_up", use_amx_, arena_);
    found->second->bias = bias;
  } else if (const auto vector = vectors.find(name); vector != vectors.end()) {
    *vector->second = weight.to(at::kFloat).contiguous();
  } else {
    TORCH_CHECK(layer.experts.set(name, weight, mixture_.shape(), use_amx_, arena_),
                "unknown weight ", name);
  }
}

c10::Dict<std::string, double> Decoder::take_timings() {
  static const char* names[] = {"embed",     "norm",   "qkv",     "rotary", "attention",
                                "attention output", "router", "gate up", "down", "head"};
  c10::Dict<std::string, double> result;
  for (size_t part = 0; part < static_cast<size_t>(Part::kCount); ++part) {
    double seconds = 0.0;
    for (Workspace& memory : workspaces_) seconds += memory.clock.take(part);
    result.insert(names[part], seconds + clock_.take(part));
  }
  return result;
}

TORCH_LIBRARY(shoal_cpu, m) {
  m.def("paged_attention", paged_attention);
  m.def("packed_linear", packed_linear);
  m.def("experts", experts);
  m.def("amx_usable", []() -> bool { return amx_usable(); });
  m.class_<Decoder>("Decoder")
      .def(torch::init<c10::Dict<std::string, double>, std::vector<int64_t>, std::string, bool>())
      .def("set_weight", &Decoder::set_weight)
      .def("forward", &Decoder::forward)
      .def("row_max", &Decoder::row_max)
      .def("take_timings", &Decoder::take_timings);
}

}  // namespace shoal
