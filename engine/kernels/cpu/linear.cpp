#include "linear.h"

#include <ATen/ops/from_blob.h>

namespace shoal {

at::Tensor pack(const at::Tensor& weight, bool paired, Arena& arena) {
  const int64_t n = weight.size(0), k = weight.size(1);
  const int64_t size = packed_blocks(n, paired) * kBlockColumns * round_up(k, kStep);
  std::shared_ptr<void> memory = arena.take(size * static_cast<int64_t>(sizeof(bf16)));
  pack_weight(static_cast<const bf16*>(weight.const_data_ptr()), n, k, paired,
              static_cast<bf16*>(memory.get()));
  return at::from_blob(memory.get(), {size}, [memory](void*) {}, weight.options());
}

Linear make_linear(const at::Tensor& weight, bool paired, bool use_amx, Arena& arena) {
  Linear linear;
  linear.n = weight.size(0);
  linear.k = weight.size(1);
  if (use_amx && weight.scalar_type() == at::kBFloat16) {
    linear.packed = pack(weight.contiguous(), paired, arena);
  } else {
    linear.plain = weight.contiguous();
  }
  return linear;
}

}  // namespace shoal
