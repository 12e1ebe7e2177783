#include "decoder.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/linear.h>

#include "vector.h"

namespace shoal {

namespace {

const float* optional(const at::Tensor& tensor) {
  return tensor.defined() ? data<float>(tensor) : nullptr;
}

}  // namespace

// Calls store(row, first_column, count, values) for all of x [rows, k] * weight^T + bias; `count` is
// a constant where a block is whole.
template <typename T, typename Store>
void Decoder::multiply(const Linear& weight, const T* x, int64_t stride, int64_t rows, Team& team,
                       const Store& store) {
  const float* bias = optional(weight.bias);
#if SHOAL_AMX
  if constexpr (std::is_same_v<T, bf16>) {
    if (weight.packed.defined()) {
      gemm(x, stride, rows, data<bf16>(weight.packed), packed_blocks(weight.n, false), weight.k,
           team, [&](int64_t row, int64_t block, float* values) {
             const int64_t column = block * kBlockColumns;
             const auto store_all = [&](auto columns) {
               if (bias != nullptr) {
                 for (int64_t i = 0; i < columns; ++i) values[i] += bias[column + i];
               }
               store(row, column, columns, values);
             };
             if (const int64_t left = weight.n - column; left < kBlockColumns) {
               store_all(left);
             } else {
               store_all(std::integral_constant<int64_t, kBlockColumns>{});
             }
           });
      return;
    }
  }
#endif
  const at::Tensor in =
      at::from_blob(const_cast<T*>(x), {rows, weight.k}, {stride, 1},
                    at::TensorOptions().dtype(scalar_type<T>()));
  const at::Tensor out =
      at::linear(in, weight.plain,
                 weight.bias.defined() ? std::optional<at::Tensor>(weight.bias.to(in.dtype()))
                                       : std::nullopt)
          .contiguous();
  const T* values = data<T>(out);
  team.each(rows, kRowGrain, [&](int64_t row) {
    store(row, int64_t{0}, weight.n, values + row * weight.n);
  });
}

// The memory's `activated` = act(gate) * up of its `input`.
template <typename T>
void Decoder::gate_up(const Linear& weight, int64_t rows, Workspace& memory, Team& team) {
  const T* x = buffer<T>(memory.input, 0);
  const int64_t stride = padded(shape_.hidden), out_stride = padded(shape_.intermediate);
  T* out = buffer<T>(memory.activated, padded_rows(rows) * out_stride);
#if SHOAL_AMX
  if constexpr (std::is_same_v<T, bf16>) {
    if (weight.packed.defined()) {
      gemm(x, stride, rows, data<bf16>(weight.packed), packed_blocks(weight.n, true), weight.k,
           team, [&](int64_t row, int64_t block, const float* values) {
             const int64_t column = block * 16;
             activate_paired(shape_.activation, values,
                             std::min<int64_t>(16, shape_.intermediate - column),
                             out + row * out_stride + column);
           });
      return;
    }
  }
#endif
  multiply<T>(weight, x, stride, rows, team,
              [&](int64_t row, int64_t, int64_t, const auto* values) {
                activate_row(shape_.activation, values, values + shape_.intermediate,
                             shape_.intermediate, out + row * out_stride);
              });
}

// The memory's `input` = norm(hidden), or hidden itself where a model has no norm there.
template <typename T>
void Decoder::normed_input(const at::Tensor& norm, const float* hidden, int64_t rows,
                           Workspace& memory, Team& team) {
  const int64_t stride = padded(shape_.hidden);
  T* out = buffer<T>(memory.input, padded_rows(rows) * stride);
  if (norm.defined()) {
    rms_norm(hidden, data<float>(norm), shape_.eps, rows, shape_.hidden, out, stride, team);
  } else {
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < shape_.hidden; ++i) {
        out[row * stride + i] = from_float<T>(hidden[row * shape_.hidden + i]);
      }
    }
  }
  memory.clock.note(Part::kNorm);
}

// hidden += norm(x * weight^T), the norm where there is one.
template <typename T>
void Decoder::add_product(const Linear& weight, const T* x, int64_t stride, float* hidden,
                          int64_t rows, const at::Tensor& norm, Workspace& memory, Team& team) {
  const int64_t width = shape_.hidden;
  if (!norm.defined()) {
    multiply<T>(weight, x, stride, rows, team,
                [&](int64_t row, int64_t column, auto count, const auto* values) {
                  float* out = hidden + row * width + column;
                  for (int64_t i = 0; i < count; ++i) out[i] += to_float(values[i]);
                });
    return;
  }
  float* branch = memory.branch.reserve(rows * width);
  multiply<T>(weight, x, stride, rows, team,
              [&](int64_t row, int64_t column, auto count, const auto* values) {
                float* out = branch + row * width + column;
                for (int64_t i = 0; i < count; ++i) out[i] = to_float(values[i]);
              });
  add_normed(branch, norm, hidden, rows, team);
}

// hidden += norm(branch), which is overwritten.
void Decoder::add_normed(float* branch, const at::Tensor& norm, float* hidden, int64_t rows,
                         Team& team) {
  const int64_t width = shape_.hidden;
  rms_norm(branch, data<float>(norm), shape_.eps, rows, width, branch, width, team);
  for (int64_t i = 0; i < rows * width; ++i) hidden[i] += branch[i];
}

template <typename T>
void Decoder::embed(const Step& step, Span span, Team& team) {
  const int64_t width = shape_.hidden;
  const auto* ids = data<int64_t>(step.token_ids);
  float* hidden = hidden_.data();
  // Models that scale embeddings do so in their own dtype.
  const float scale = to_float(from_float<T>(shape_.embedding_scale));
  team.each(span.count, kRowGrain, [&](int64_t index) {
    const int64_t token = span.first + index;
    for (int64_t i = 0; i < width; ++i) {
      T value;
      if constexpr (std::is_same_v<T, bf16>) {
        value = embedding_.packed.defined()
                    ? packed_at(data<bf16>(embedding_.packed), width, ids[token], i)
                    : data<T>(embedding_.plain)[ids[token] * width + i];
      } else {
        value = data<T>(embedding_.plain)[ids[token] * width + i];
      }
      hidden[token * width + i] = to_float(from_float<T>(to_float(value) * scale));
    }
  });
}

// From the residual stream of a span to its queries and its slots of the cache.
template <typename T>
void Decoder::before_attention(const Step& step, int64_t index, Span span, Workspace& memory,
                               Team& team) {
  const Layer& layer = layers_[index];
  const HeadShape& heads = shape_.heads;
  normed_input<T>(layer.input_norm, hidden_.data() + span.first * shape_.hidden, span.count,
                  memory, team);
  T* qkv = buffer<T>(memory.qkv, span.count * layer.qkv.n);
  multiply<T>(layer.qkv, buffer<T>(memory.input, 0), padded(shape_.hidden), span.count, team,
              [&](int64_t row, int64_t column, auto count, const auto* values) {
                T* out = qkv + row * layer.qkv.n + column;
                for (int64_t i = 0; i < count; ++i) out[i] = from_float<T>(to_float(values[i]));
              });
  memory.clock.note(Part::kQkv);
  const at::Tensor &keys = step.keys[index], &values = step.values[index];
  const KVSlots<T> slots{static_cast<T*>(keys.mutable_data_ptr()),
                         static_cast<T*>(values.mutable_data_ptr()),
                         data<int64_t>(step.slot_blocks) + span.first,
                         data<int64_t>(step.slot_offsets) + span.first, keys.size(2)};
  const auto head_norm = [&](const at::Tensor& weight) {
    return HeadNorm{optional(weight), weight.defined() && weight.numel() > heads.dim};
  };
  const int64_t half = step.cos.size(1);
  rotate_and_write(qkv, layer.qkv.n, span.count, heads,
                   {data<float>(step.cos) + span.first * half,
                    data<float>(step.sin) + span.first * half, half},
                   head_norm(layer.query_norm), head_norm(layer.key_norm), shape_.eps,
                   buffer<T>(queries_, 0) + span.first * heads.heads * heads.dim, slots, team);
  memory.clock.note(Part::kRotary);
}

template <typename T>
void Decoder::attention(const Step& step, int64_t index, const AttentionPlan& plan) {
  const Layer& layer = layers_[index];
  const at::Tensor &keys = step.keys[index], &values = step.values[index];
  const AttentionInputs<T> inputs{buffer<T>(queries_, 0),
                                  static_cast<const T*>(keys.const_data_ptr()),
                                  static_cast<const T*>(values.const_data_ptr()),
                                  keys.size(2),
                                  shape_.heads,
                                  buffer<T>(context_, 0),
                                  padded(shape_.heads.heads * shape_.heads.dim)};
  attend(inputs, {shape_.attention_scale, layer.window, shape_.attention_softcap, nullptr}, plan,
         scratch_, use_amx_, *team_);
}

// From what attention gave a span to its residual stream after the layer, or, in a layer of experts,
// to the choice of them: `add_experts` goes on from there.
template <typename T>
void Decoder::after_attention(int64_t index, Span span, Workspace& memory, Team& team) {
  const Layer& layer = layers_[index];
  float* hidden = hidden_.data() + span.first * shape_.hidden;
  const int64_t stride = padded(shape_.heads.heads * shape_.heads.dim);
  add_product<T>(layer.output, buffer<T>(context_, 0) + span.first * stride, stride, hidden,
                 span.count, layer.attention_output_norm, memory, team);
  memory.clock.note(Part::kOutput);
  normed_input<T>(layer.mlp_norm, hidden, span.count, memory, team);
  if (layer.experts.defined()) {
    mixture_.route<T>(layer.experts, buffer<T>(memory.input, 0), span.first, span.count, team);
    memory.clock.note(Part::kRouter);
    return;
  }
  gate_up<T>(layer.gate_up, span.count, memory, team);
  memory.clock.note(Part::kGateUp);
  add_product<T>(layer.down, buffer<T>(memory.activated, 0), padded(shape_.intermediate), hidden,
                 span.count, layer.mlp_output_norm, memory, team);
  memory.clock.note(Part::kDown);
}

// Adds what their experts give all `rows` of the residual stream. Not by spans, each of which would
// read every expert it uses.
template <typename T>
void Decoder::add_experts(int64_t index, int64_t rows) {
  const Layer& layer = layers_[index];
  float* hidden = hidden_.data();
  clock_.start();
  mixture_.gather<T>(rows, *team_);
  mixture_.gate_up<T>(layer.experts, *team_);
  clock_.note(Part::kGateUp);
  if (!layer.mlp_output_norm.defined()) {
    mixture_.add_down<T>(layer.experts, hidden, *team_);
  } else {
    float* branch = workspaces_[0].branch.reserve(rows * shape_.hidden);
    std::fill_n(branch, rows * shape_.hidden, 0.0f);
    mixture_.add_down<T>(layer.experts, branch, *team_);
    add_normed(branch, layer.mlp_output_norm, hidden, rows, *team_);
  }
  clock_.note(Part::kDown);
}

// Leaves only `rows` of the residual stream and of what attention gave: nothing reads the others
// once the last layer's keys and values are written.
template <typename T>
void Decoder::keep_rows(const at::Tensor& rows) {
  const auto* kept = data<int64_t>(rows);
  const int64_t count = rows.numel(), width = shape_.hidden;
  const int64_t stride = padded(shape_.heads.heads * shape_.heads.dim);
  float* copy = kept_.reserve(count * (width + stride));
  T* context = buffer<T>(context_, 0);
  float* hidden = hidden_.data();
  for (int64_t i = 0; i < count; ++i) {
    std::copy_n(hidden + kept[i] * width, width, copy + i * width);
    for (int64_t j = 0; j < stride; ++j) {
      copy[count * width + i * stride + j] = to_float(context[kept[i] * stride + j]);
    }
  }
  std::copy_n(copy, count * width, hidden);
  for (int64_t i = 0; i < count * stride; ++i) context[i] = from_float<T>(copy[count * width + i]);
}

// Memory of the step before, once nobody has its logits any more: new memory, a page at a time, takes
// as long as the product.
at::Tensor Decoder::take_logits(int64_t rows) {
  const int64_t count = rows * shape_.vocab;
  if (!logits_.defined() || logits_.numel() < count || logits_.storage().use_count() > 1) {
    logits_ = at::empty({count}, at::TensorOptions().dtype(at::kFloat));
  }
  return logits_.narrow(0, 0, count).view({rows, shape_.vocab});
}

template <typename T>
at::Tensor Decoder::head(int64_t rows, Workspace& memory) {
  normed_input<T>(final_norm_, hidden_.data(), rows, memory, *team_);
  const at::Tensor logits = take_logits(rows);
  auto* out = static_cast<float*>(logits.mutable_data_ptr());
  const float cap = shape_.final_softcap;
  multiply<T>(head_.n != 0 ? head_ : embedding_, buffer<T>(memory.input, 0), padded(shape_.hidden),
              rows, *team_, [&](int64_t row, int64_t column, auto count, const auto* values) {
                float* place = out + row * shape_.vocab + column;
                for (int64_t i = 0; i < count; ++i) place[i] = to_float(values[i]);
                if (cap == 0.0f) return;
                for (int64_t i = 0; i < count; ++i) place[i] = cap * std::tanh(place[i] / cap);
              });
  memory.clock.note(Part::kHead);
  return logits;
}

// Calls body(span, memory, team) for all of `tokens`. Few tokens are one span, whose products all
// threads share by columns. Of many, each thread takes spans of its own: what one part of a layer
// writes, the next then finds in the cache of the core that wrote it.
template <typename Body>
void Decoder::spans(int64_t tokens, const Body& body) {
  const bool by_rows = use_amx_ && dtype_ == at::kBFloat16 && team_->count() > 1 &&
                       tokens >= team_->count() * kFewestSpanRows;
  if (!by_rows) {
    workspaces_[0].clock.start();
    body(Span{0, tokens}, workspaces_[0], *team_);
    return;
  }
  const int64_t share = team_->count() * kMostSpanRows;
  const int64_t count = (tokens + share - 1) / share * team_->count();
  const int64_t rows = round_up((tokens + count - 1) / count, kBlockRows);
  team_->each((tokens + rows - 1) / rows, 1, [&](int64_t index) {
    Workspace& memory = workspaces_[Team::index()];
    memory.clock.start(1.0 / team_->count());
    const int64_t first = index * rows;
    body(Span{first, std::min(rows, tokens - first)}, memory, alone_);
  });
}

template <typename T>
at::Tensor Decoder::run(const Step& step) {
  const int64_t tokens = step.token_ids.numel(), kept = step.rows.numel();
  const int64_t sequences = step.context_lens.numel();
  const HeadShape& heads = shape_.heads;
  const BatchView view{data<int64_t>(step.query_starts), data<int64_t>(step.context_lens),
                       data<int32_t>(step.block_tables), step.block_tables.size(1), sequences,
                       step.keys.at(0).size(2)};
  const AttentionPlan plan =
      plan_attention(view, {heads.heads / heads.kv_heads, heads.kv_heads, team_->count()});
  hidden_.reserve(tokens * shape_.hidden);
  buffer<T>(queries_, tokens * heads.heads * heads.dim);
  buffer<T>(context_, padded_rows(tokens) * padded(heads.heads * heads.dim));
  mixture_.reserve<T>(tokens);
  spans(tokens, [&](Span span, Workspace& memory, Team& team) {
    embed<T>(step, span, team);
    memory.clock.note(Part::kEmbed);
    before_attention<T>(step, 0, span, memory, team);
  });
  const auto last = static_cast<int64_t>(layers_.size()) - 1;
  for (int64_t index = 0; index <= last; ++index) {
    clock_.start();
    attention<T>(step, index, plan);
    clock_.note(Part::kAttention);
    if (index == last) break;
    const bool has_experts = layers_[index].experts.defined();
    const auto begin_next = [&](Span span, Workspace& memory, Team& team) {
      before_attention<T>(step, index + 1, span, memory, team);
    };
    spans(tokens, [&](Span span, Workspace& memory, Team& team) {
      after_attention<T>(index, span, memory, team);
      if (!has_experts) begin_next(span, memory, team);
    });
    if (has_experts) {
      add_experts<T>(index, tokens);
      spans(tokens, begin_next);
    }
  }
  if (kept == 0) return at::empty({0, shape_.vocab}, at::TensorOptions().dtype(at::kFloat));
  keep_rows<T>(step.rows);
  Workspace& memory = workspaces_[0];
  memory.clock.start();
  after_attention<T>(last, {0, kept}, memory, *team_);
  if (layers_[last].experts.defined()) {
    add_experts<T>(last, kept);
    memory.clock.start();
  }
  return head<T>(kept, memory);
}

void Decoder::gather_team() {
  const int threads = at::get_num_threads();
  if (team_ != nullptr && team_->count() == threads) return;
  team_ = std::make_unique<Team>(threads);
  workspaces_ = std::vector<Workspace>(threads);
}

at::Tensor Decoder::forward(const c10::Dict<std::string, at::Tensor>& tensors,
                            std::vector<at::Tensor> keys, std::vector<at::Tensor> values) {
  gather_team();
  const auto get = [&](const char* name) { return tensors.at(name); };
  const Step step{get("token_ids"),    get("cos"),          get("sin"),
                  get("slot_blocks"),  get("slot_offsets"), get("query_starts"),
                  get("context_lens"), get("block_tables"), get("rows"),
                  std::move(keys),     std::move(values)};
  TORCH_CHECK(step.keys.size() == layers_.size() && step.values.size() == layers_.size(),
              "a cache of ", step.keys.size(), " layers for a model of ", layers_.size());
  return dtype_ == at::kFloat ? run<float>(step) : run<bf16>(step);
}

std::tuple<at::Tensor, at::Tensor> Decoder::row_max(const at::Tensor& logits) {
  TORCH_CHECK(logits.scalar_type() == at::kFloat && logits.is_contiguous(),
              "row_max takes what forward gave");
  gather_team();
  const int64_t rows = logits.size(0), columns = logits.size(1);
  at::Tensor best = at::empty({rows}, logits.options());
  at::Tensor ids = at::empty({rows}, logits.options().dtype(at::kLong));
  auto* values = static_cast<float*>(best.mutable_data_ptr());
  auto* places = static_cast<int64_t*>(ids.mutable_data_ptr());
  team_->each(rows, 1, [&](int64_t row) {
    const float* x = data<float>(logits) + row * columns;
    places[row] = largest_of(x, columns);
    values[row] = x[places[row]];
  });
  return {best, ids};
}

}  // namespace shoal
