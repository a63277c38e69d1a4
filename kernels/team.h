// The threads of one call: a barrier that spins, a fair split of work, and the clock of the stage stamps.
#pragma once

#include <omp.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace labkit {

inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

struct Range {
  int64_t begin, end;
};

class Team {
 public:
  // Fixes the size to what the parallel region really got; called by every thread first.
  void join() {
    if (omp_get_thread_num() == 0) size_.store(omp_get_num_threads(), std::memory_order_release);
#pragma omp barrier
  }
  int size() const { return size_.load(std::memory_order_relaxed); }

  // Spins, because a stage lasts microseconds; yields after a while, so that more threads than cores still get on.
  void barrier() {
    const int team = size();
    if (team == 1) return;
    const uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == team - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) {
      if (spins < 4000) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
      } else {
        sched_yield();
      }
    }
  }

  Range share(int64_t items, int thread) const { return {items * thread / size(), items * (thread + 1) / size()}; }

 private:
  alignas(64) std::atomic<int> size_{1};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
};

// Memory of one thread that lasts from call to call and grows when asked for more.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  template <class V>
  V* get(size_t count) {
    const size_t bytes = (count * sizeof(V) + 63) / 64 * 64;
    if (bytes > bytes_) {
      std::free(data_);
      data_ = std::aligned_alloc(64, bytes);
      if (!data_) throw std::bad_alloc();
      bytes_ = bytes;
    }
    return static_cast<V*>(data_);
  }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

struct ThreadScratch {
  Scratch rows;       // normalised row and residual, alive for a whole region
  Scratch sums;       // GEMM accumulators
  Scratch last_tile;  // rows of a GEMM that don't fill a tile
  Scratch scores;     // attention
};

// The calling thread's own, kept from call to call. Static: an inline function's object would be one for all loaded
// libraries, also for the one that an edited source was compiled to.
static ThreadScratch& thread_scratch() {
  static thread_local ThreadScratch scratch;
  return scratch;
}

}  // namespace labkit
