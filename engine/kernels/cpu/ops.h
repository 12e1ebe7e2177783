// What lies between the products: norms, rotary embedding with the KV write, activations; and the
// largest logit.
//
// Invariant: each works on packed rows [T, ...]; T is what the caches and products hold, float or
// bf16, and the residual stream is float32 throughout.

#pragma once

#include <algorithm>
#include <cmath>

#include "team.h"
#include "vector.h"

namespace shoal {

// 1 / root mean square of x [n].
template <typename T>
float inverse_rms(const T* x, int64_t n, float eps) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) {
    const float value = to_float(x[i]);
    sum += value * value;
  }
  return 1.0f / std::sqrt(sum / static_cast<float>(n) + eps);
}

// Rows below this are done before another thread would have noticed.
constexpr int64_t kRowGrain = 8;

// out [rows, n] = x / rms(x) * weight (https://arxiv.org/abs/1910.07467); `out` may be `x`.
template <typename T>
void rms_norm(const float* x, const float* weight, float eps, int64_t rows, int64_t n, T* out,
              int64_t out_stride, Team& team) {
  const auto one = [&](int64_t row) {
    const float* in = x + row * n;
    T* result = out + row * out_stride;
#if SHOAL_AMX
    if constexpr (std::is_same_v<T, bf16>) {
      if (n % 16 == 0) {
        const float mean = sum_of_squares(in, n) / static_cast<float>(n);
        scale_row(in, 1.0f / std::sqrt(mean + eps), weight, n, result);
        return;
      }
    }
#endif
    const float scale = inverse_rms(in, n, eps);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) result[i] = from_float<T>(in[i] * scale * weight[i]);
  };
  team.each(rows, kRowGrain, one);
}

// Place of the first of the largest of x [n], n > 0, or of its first NaN.
inline int64_t largest_of(const float* x, int64_t n) {
  float largest = x[0];
  int not_a_number = 0;
#pragma omp simd reduction(max : largest) reduction(| : not_a_number)
  for (int64_t i = 0; i < n; ++i) {
    largest = x[i] > largest ? x[i] : largest;
    not_a_number |= x[i] != x[i];
  }
  return std::find_if(x, x + n, [&](float value) {
           return not_a_number != 0 ? value != value : value == largest;
         }) - x;
}

enum class Activation { kSilu, kGelu, kGeluTanh };

inline float activate(Activation kind, float x) {
  switch (kind) {
    case Activation::kSilu:
      return x / (1.0f + fast_exp(x < -80.0f ? 80.0f : -x));
    case Activation::kGeluTanh:
      return 0.5f * x * (1.0f + fast_tanh(0.7978845608028654f * (x + 0.044715f * x * x * x)));
    case Activation::kGelu:
      break;
  }
  return 0.5f * x * (1.0f + std::erf(x * 0.7071067811865476f));
}

// out [i] = act(gate [i]) * up [i]
template <typename G, typename T>
void activate_row(Activation kind, const G* gate, const G* up, int64_t n, T* out) {
  if (kind == Activation::kSilu) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      const float g = to_float(gate[i]);
      // exp of more than 80 would overflow further down; the quotient is 0 there all the same.
      const float e = fast_exp(g < -80.0f ? 80.0f : -g);
      out[i] = from_float<T>(g / (1.0f + e) * to_float(up[i]));
    }
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    out[i] = from_float<T>(activate(kind, to_float(gate[i])) * to_float(up[i]));
  }
}

#if SHOAL_AMX

// out [n], n <= 16, of a row of 16 gates and the 16 values they are for.
inline void activate_paired(Activation kind, const float* values, int64_t n, bf16* out) {
  if (n == 16 && kind == Activation::kSilu) {
    silu_times(values, out);
  } else {
    activate_row(kind, values, values + 16, n, out);
  }
}

#endif

// How a head turns: the first 2 * half elements, pairs (i, i + half), by the token's angles.
struct Rotation {
  const float* cos;  // [T, half]
  const float* sin;
  int64_t half;
};

// One head of `size` elements, normed if `weight` is given, rotated, to `out`.
template <typename T>
void turn_head(const T* in, int64_t size, const float* weight, float scale, const float* cos,
               const float* sin, int64_t half, T* out) {
#if SHOAL_AMX
  if constexpr (std::is_same_v<T, bf16>) {
    if (half % 16 == 0) {
      turn_pairs(in, weight, scale, cos, sin, half, out);
      for (int64_t i = 2 * half; i < size; ++i) {
        const float value = to_float(in[i]);
        out[i] = from_float<T>(weight == nullptr ? value : value * scale * weight[i]);
      }
      return;
    }
  }
#endif
  const auto value = [&](int64_t i) {
    return weight == nullptr ? to_float(in[i]) : to_float(in[i]) * scale * weight[i];
  };
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    const float first = value(i), second = value(i + half);
    out[i] = from_float<T>(first * cos[i] - second * sin[i]);
    out[i + half] = from_float<T>(second * cos[i] + first * sin[i]);
  }
  for (int64_t i = 2 * half; i < size; ++i) out[i] = from_float<T>(value(i));
}

// A norm of queries or keys before they turn: none, over each head, or over all heads at once.
struct HeadNorm {
  const float* weight = nullptr;
  bool whole = false;
};

struct HeadShape {
  int64_t heads, kv_heads, dim;
};

// Slots of this step's tokens in one layer's caches [num_blocks, kv_heads, block_size, dim].
template <typename T>
struct KVSlots {
  T* keys;
  T* values;
  const int64_t* blocks;   // [T]
  const int64_t* offsets;  // [T]
  int64_t block_size;
};

// qkv [T, heads + 2 * kv_heads, dim] to queries [T, heads, dim] and the caches.
template <typename T>
void rotate_and_write(const T* qkv, int64_t qkv_stride, int64_t tokens, const HeadShape& shape,
                      const Rotation& rotation, const HeadNorm& query_norm,
                      const HeadNorm& key_norm, float eps, T* queries, const KVSlots<T>& slots,
                      Team& team) {
  const int64_t dim = shape.dim, half = rotation.half;
  const auto one = [&](int64_t token) {
    const float* cos = rotation.cos + token * half;
    const float* sin = rotation.sin + token * half;
    const T* in = qkv + token * qkv_stride;
    const auto turn = [&](const HeadNorm& norm, const T* first, int64_t heads, T* out,
                          int64_t stride) {
      float scale = norm.whole ? inverse_rms(first, heads * dim, eps) : 1.0f;
      for (int64_t head = 0; head < heads; ++head) {
        const T* source = first + head * dim;
        const float* weight = norm.weight;
        if (weight != nullptr && norm.whole) weight += head * dim;
        if (weight != nullptr && !norm.whole) scale = inverse_rms(source, dim, eps);
        turn_head(source, dim, weight, scale, cos, sin, half, out + head * stride);
      }
    };
    turn(query_norm, in, shape.heads, queries + token * shape.heads * dim, dim);
    const int64_t head_stride = slots.block_size * dim;
    const int64_t slot = slots.blocks[token] * shape.kv_heads * head_stride +
                         slots.offsets[token] * dim;
    turn(key_norm, in + shape.heads * dim, shape.kv_heads, slots.keys + slot, head_stride);
    const T* value = in + (shape.heads + shape.kv_heads) * dim;
    for (int64_t head = 0; head < shape.kv_heads; ++head) {
      std::copy_n(value + head * dim, dim, slots.values + slot + head * head_stride);
    }
  };
  team.each(tokens, kRowGrain, one);
}

}  // namespace shoal
