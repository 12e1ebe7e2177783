// What products are given: a weight in one of two forms, and rows padded to whole tiles.
//
// Invariant: padding is zero in columns and arbitrary in rows.

#pragma once

#include <ATen/core/Tensor.h>

#include <type_traits>

#include "arena.h"
#include "gemm.h"

namespace shoal {

// A matrix [n, k] that inputs [*, k] are multiplied with, transposed. One of the two forms is there.
struct Linear {
  at::Tensor plain, packed;
  at::Tensor bias;  // float32 [n]; for paired packing none
  int64_t n = 0, k = 0;
};

// `weight` [n, k] as gemm.h has it.
at::Tensor pack(const at::Tensor& weight, bool paired, Arena& arena);

// Packed where `use_amx` and `weight` is bfloat16, else as it is.
Linear make_linear(const at::Tensor& weight, bool paired, bool use_amx, Arena& arena);

template <typename T>
constexpr at::ScalarType scalar_type() {
  return std::is_same_v<T, float> ? at::kFloat : at::kBFloat16;
}

template <typename T>
T* buffer(Buffer<uint8_t>& memory, int64_t count) {
  return reinterpret_cast<T*>(memory.reserve(count * static_cast<int64_t>(sizeof(T))));
}

template <typename T>
const T* data(const at::Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

// Rows as a product reads them.
inline int64_t padded(int64_t columns) { return round_up(columns, kStep); }
inline int64_t padded_rows(int64_t rows) { return round_up(rows, kBlockRows); }

}  // namespace shoal
