#include "gemm.h"

#include <cstring>

#if SHOAL_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace shoal {

bool amx_usable() {
#if SHOAL_AMX
  // Linux hands out the tile state on request only (Documentation/arch/x86/xstate.rst).
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  static const bool usable = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return usable;
#else
  return false;
#endif
}

void pack_weight(const bf16* weight, int64_t n, int64_t k, bool paired, bf16* packed) {
  const int64_t blocks = packed_blocks(n, paired), steps = round_up(k, kStep) / kStep;
#pragma omp parallel for
  for (int64_t block = 0; block < blocks; ++block) {
    for (int64_t step = 0; step < steps; ++step) {
      for (int64_t column = 0; column < kBlockColumns; ++column) {
        const int64_t row = packed_row(block, column, n, paired);
        bf16* tile = packed + ((block * steps + step) * 2 + column / 16) * kTileElements;
        bf16* place = tile + column % 16 * 2;
        const bf16* source = weight + row * k + step * kStep;
        const int64_t left = row < n ? std::min(kStep, k - step * kStep) : 0;
        if (left == kStep) {
          for (int64_t i = 0; i < kStep; i += 2) {
            std::memcpy(place + i * 16, source + i, 2 * sizeof(bf16));
          }
          continue;
        }
        for (int64_t i = 0; i < kStep; ++i) {
          place[i / 2 * 32 + i % 2] = i < left ? source[i] : bf16{0};
        }
      }
    }
  }
}

}  // namespace shoal
