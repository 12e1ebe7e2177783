// Memory for weights that are packed once and read in every step.
//
// Invariant: pieces lie end to end in chunks of whole huge pages, since with 4 KiB pages address
// translation takes a large part of the time that reading takes. The kernel may decline; nothing
// depends on it.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace shoal {

class Arena {
 public:
  // `bytes` of memory that lives as long as the pointer, 64-byte aligned.
  std::shared_ptr<void> take(int64_t bytes) {
    bytes = (bytes + 63) / 64 * 64;
    if (bytes > left_) add_chunk(bytes);
    void* piece = next_;
    next_ += bytes;
    left_ -= bytes;
    return {chunk_, piece};
  }

 private:
  static constexpr int64_t kPage = int64_t{2} << 20;
  static constexpr int64_t kChunk = 32 * kPage;

  void add_chunk(int64_t bytes) {
    // What a read-ahead past the last piece touches belongs to the chunk too.
    const int64_t size = std::max(kChunk, (bytes + kPage) / kPage * kPage + kPage);
    void* memory = std::aligned_alloc(kPage, size);
    if (memory == nullptr) throw std::bad_alloc();
#if defined(__linux__)
    madvise(memory, size, MADV_HUGEPAGE);
#endif
    chunk_ = std::shared_ptr<void>(memory, std::free);
    next_ = static_cast<char*>(memory);
    left_ = size;
  }

  std::shared_ptr<void> chunk_;
  char* next_ = nullptr;
  int64_t left_ = 0;
};

}  // namespace shoal
