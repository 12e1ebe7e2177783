#include "experts.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/linear.h>

#include "vector.h"

namespace shoal {

namespace {

// Claims of a thread in a product of many rows: each claim reads all of the rows again.
constexpr int64_t kClaimsOfManyRows = 2;

// Rows of a buffer in which products begin at any row.
int64_t readable_rows(int64_t rows) { return rows + kBlockRows; }

// x [rows, k] * weight^T by torch, in the dtype of `weight`.
template <typename T>
at::Tensor plain_product(const T* x, int64_t stride, int64_t rows, const Linear& weight) {
  const at::Tensor in = at::from_blob(const_cast<T*>(x), {rows, weight.k}, {stride, 1},
                                      at::TensorOptions().dtype(scalar_type<T>()));
  return at::linear(in.to(weight.plain.dtype()), weight.plain).contiguous();
}

#if SHOAL_AMX

// Calls body(expert, first, count) for parts of the `blocks` of each of `experts`.
template <typename Body>
void each_part(const std::vector<int64_t>& experts, int64_t blocks, Team& team, const Body& body) {
  const int64_t tasks = static_cast<int64_t>(experts.size()) * blocks;
  team.run(tasks, team.grain(tasks), [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t first = begin % blocks, count = std::min(end - begin, blocks - first);
      body(experts[begin / blocks], first, count);
      begin += count;
    }
  });
}

#endif

}  // namespace

bool ExpertLayer::set(const std::string& name, const at::Tensor& weight, const ExpertShape& shape,
                      bool use_amx, Arena& arena) {
  const auto check = [&](at::IntArrayRef expected) {
    TORCH_CHECK(weight.sizes() == expected, name, " has shape ", weight.sizes(), ", not ",
                expected);
  };
  const auto each_expert = [&](bool paired) {
    std::vector<Linear> linears;
    for (int64_t expert = 0; expert < shape.count; ++expert) {
      linears.push_back(make_linear(weight[expert], paired, use_amx, arena));
    }
    return linears;
  };
  if (name == "router") {
    check({shape.count, shape.hidden});
    router = make_linear(weight, false, use_amx, arena);
    // A product in bfloat16 would be rounded, and close scores go to other experts.
    if (router.plain.defined()) router.plain = router.plain.to(at::kFloat);
  } else if (name == "expert_gate_up") {
    check({shape.count, 2 * shape.intermediate, shape.hidden});
    gate_up = each_expert(true);
  } else if (name == "expert_down") {
    check({shape.count, shape.hidden, shape.intermediate});
    down = each_expert(false);
  } else {
    return false;
  }
  return true;
}

template <typename T>
void Mixture::reserve(int64_t rows) {
  if (shape_.count == 0) return;
  const int64_t places = readable_rows(rows * shape_.per_row);
  routing_.reserve(rows, shape_.count, shape_.per_row);
  logits_.reserve(rows * shape_.count);
  buffer<T>(input_, rows * padded(shape_.hidden));
  buffer<T>(gathered_, places * padded(shape_.hidden));
  buffer<T>(activated_, places * padded(shape_.intermediate));
}

template <typename T>
void Mixture::route(const ExpertLayer& layer, const T* x, int64_t first, int64_t rows,
                    Team& team) {
  const int64_t stride = padded(shape_.hidden), experts = shape_.count;
  std::copy_n(x, rows * stride, buffer<T>(input_, 0) + first * stride);
  float* logits = logits_.data() + first * experts;
  const Linear& router = layer.router;
  if (router.plain.defined()) {
    const at::Tensor product = plain_product(x, stride, rows, router);
    std::copy_n(data<float>(product), rows * experts, logits);
  }
#if SHOAL_AMX
  if constexpr (std::is_same_v<T, bf16>) {
    if (router.packed.defined()) {
      gemm(x, stride, rows, data<bf16>(router.packed), packed_blocks(experts, false), router.k,
           team, [&](int64_t row, int64_t block, const float* values) {
             const int64_t column = block * kBlockColumns;
             std::copy_n(values, std::min(kBlockColumns, experts - column),
                         logits + row * experts + column);
           });
    }
  }
#endif
  team.each(rows, kRowGrain, [&](int64_t row) {
    routing_.choose(first + row, logits + row * experts, shape_.normalized);
  });
}

template <typename T>
void Mixture::gather(int64_t rows, Team& team) {
  routing_.group(rows);
  const int64_t stride = padded(shape_.hidden);
  const T* in = buffer<T>(input_, 0);
  T* out = buffer<T>(gathered_, 0);
  team.each(routing_.count(), kRowGrain, [&](int64_t place) {
    std::copy_n(in + routing_[place].row * stride, stride, out + place * stride);
  });
}

template <typename T>
void Mixture::gate_up(const ExpertLayer& layer, Team& team) {
  const int64_t width = shape_.intermediate;
  const int64_t stride = padded(shape_.hidden), out_stride = padded(width);
  const T* in = buffer<T>(gathered_, 0);
  T* out = buffer<T>(activated_, 0);
#if SHOAL_AMX
  if constexpr (std::is_same_v<T, bf16>) {
    if (layer.router.packed.defined()) {
      each_part(routing_.used(), packed_blocks(2 * width, true), team,
                [&](int64_t expert, int64_t first_block, int64_t blocks) {
        const Linear& weight = layer.gate_up[expert];
        const int64_t first = routing_.first(expert);
        gemm(in + first * stride, stride, routing_.count_of(expert),
             data<bf16>(weight.packed) + first_block * packed_elements(kBlockColumns, weight.k),
             blocks, weight.k, alone_,
             [&](int64_t row, int64_t block, const float* values) {
               const int64_t column = (first_block + block) * 16;
               activate_paired(shape_.activation, values, std::min<int64_t>(16, width - column),
                               out + (first + row) * out_stride + column);
             });
      });
      return;
    }
  }
#endif
  for (const int64_t expert : routing_.used()) {
    const int64_t first = routing_.first(expert), count = routing_.count_of(expert);
    const at::Tensor product =
        plain_product(in + first * stride, stride, count, layer.gate_up[expert]);
    team.each(count, kRowGrain, [&](int64_t row) {
      const T* values = data<T>(product) + row * 2 * width;
      activate_row(shape_.activation, values, values + width, width,
                   out + (first + row) * out_stride);
    });
  }
}

template <typename T>
void Mixture::add_down(const ExpertLayer& layer, float* out, Team& team) {
  const int64_t width = shape_.hidden, stride = padded(shape_.intermediate);
  const T* in = buffer<T>(activated_, 0);
  const auto add = [&](const Place& place, int64_t column, auto count, const auto* values) {
    float* result = out + place.row * width + column;
    for (int64_t i = 0; i < count; ++i) result[i] += place.weight * to_float(values[i]);
  };
#if SHOAL_AMX
  if constexpr (std::is_same_v<T, bf16>) {
    if (layer.router.packed.defined()) {
      const int64_t all = packed_blocks(width, false);
      const int64_t claims = team.count() * kClaimsOfManyRows;
      const int64_t grain =
          routing_.count() > kChunkRows ? (all + claims - 1) / claims : team.grain(all);
      team.run(all, grain, [&](int64_t first_block, int64_t end) {
        for (const int64_t expert : routing_.used()) {
          const Linear& weight = layer.down[expert];
          const int64_t first = routing_.first(expert);
          gemm(in + first * stride, stride, routing_.count_of(expert),
               data<bf16>(weight.packed) + first_block * packed_elements(kBlockColumns, weight.k),
               end - first_block, weight.k, alone_,
               [&](int64_t row, int64_t block, const float* values) {
                 const int64_t column = (first_block + block) * kBlockColumns;
                 const Place& place = routing_[first + row];
                 if (const int64_t left = width - column; left < kBlockColumns) {
                   add(place, column, left, values);
                 } else {
                   add(place, column, std::integral_constant<int64_t, kBlockColumns>{}, values);
                 }
               });
        }
      });
      return;
    }
  }
#endif
  for (const int64_t expert : routing_.used()) {
    const int64_t first = routing_.first(expert), count = routing_.count_of(expert);
    const at::Tensor product =
        plain_product(in + first * stride, stride, count, layer.down[expert]);
    team.each(count, kRowGrain, [&](int64_t row) {
      add(routing_[first + row], 0, width, data<T>(product) + row * width);
    });
  }
}

#define SHOAL_MIXTURE_OF(T)                                                              \
  template void Mixture::reserve<T>(int64_t);                                            \
  template void Mixture::route<T>(const ExpertLayer&, const T*, int64_t, int64_t, Team&); \
  template void Mixture::gather<T>(int64_t, Team&);                                      \
  template void Mixture::gate_up<T>(const ExpertLayer&, Team&);                          \
  template void Mixture::add_down<T>(const ExpertLayer&, float*, Team&);
SHOAL_MIXTURE_OF(float)
SHOAL_MIXTURE_OF(bf16)
#undef SHOAL_MIXTURE_OF

}  // namespace shoal
