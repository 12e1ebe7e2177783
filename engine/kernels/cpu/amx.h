// The tile unit: permission to use it, and its configuration.
//
// Invariant: all eight tiles are 16 rows of 64 bytes. Work that is smaller is padded by its caller,
// so no kernel configures tiles of its own.

#pragma once

#include "common.h"

namespace shoal {

// Whether this build has AMX kernels and the kernel lets this process use tiles. Asks once.
bool amx_usable();

}  // namespace shoal

#if SHOAL_AMX

#include <immintrin.h>

namespace shoal {

// Configures the tiles of the calling thread for as long as it lives.
class Tiles {
 public:
  Tiles() {
    alignas(64) uint8_t config[64] = {};
    config[0] = 1;  // palette
    for (int tile = 0; tile < 8; ++tile) {
      config[16 + 2 * tile] = 64;  // bytes of a row, 16 bits little endian
      config[48 + tile] = 16;      // rows
    }
    // gcc takes the instruction to read 8 bytes of them, and may leave the others unwritten.
    asm volatile("" ::"r"(config) : "memory");
    _tile_loadconfig(config);
  }
  // Others in the process (oneDNN) configure tiles too, and expect none to be in use.
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

}  // namespace shoal

#endif
