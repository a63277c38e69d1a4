// Only multiplies registers, with the instruction of prompts in this build's weight type. Its products per second are
// the limit that prompts and large batches are compared with.
#include "gemm/panels.h"

namespace labkit {

constexpr int64_t kPeakSteps = 4096;  // of all sums, between two looks at the clock
// Enough sums that none waits for its last product: a Zen 5 core begins two bf16 products in a cycle and ends them at
// least 6 cycles later.
constexpr int kPeakSums = kWidth == 16 ? 16 : 12;  // shorter vectors have 16 registers in all

// Hides the value of a register from the compiler, so that it neither drops nor moves computations with it.
template <class V>
inline void hide(V& v) {
#if defined(__x86_64__)
  asm volatile("" : "+v"(v));
#else
  asm volatile("" : "+w"(v));
#endif
}

// Multiplications and additions of one call, which takes about 20 microseconds.
template <class T>
int64_t multiply_registers() {
#if defined(LABKIT_HAS_AMX)
  if constexpr (std::is_same_v<Activation<T>, bf16>) {
    static constexpr TileConfig config;
    _tile_loadconfig(&config);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
    for (int64_t step = 0; step < kPeakSteps; step += 4) {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
    return kPeakSteps * 2 * kTileRows * kTileRows * kTileDepth;
  }
#endif
  vf sums[kPeakSums] = {}, a = broadcast(0.5f), b = broadcast(0.25f);
  hide(a), hide(b);
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<Activation<T>, bf16>) {
    for (int64_t step = 0; step < kPeakSteps; ++step) {
#pragma GCC unroll 16
      for (int i = 0; i < kPeakSums; ++i) {
        sums[i] = (vf)_mm512_dpbf16_ps((__m512)sums[i], (__m512bh)a, (__m512bh)b);
        hide(sums[i]);
      }
    }
    return kPeakSteps * kPeakSums * 2 * 2 * kWidth;
  }
#endif
  for (int64_t step = 0; step < kPeakSteps; ++step) {
#pragma GCC unroll 16
    for (int i = 0; i < kPeakSums; ++i) {
      sums[i] = sums[i] * a + b;
      hide(sums[i]);
    }
  }
  return kPeakSteps * kPeakSums * 2 * kWidth;
}

}  // namespace labkit

// Multiplications and additions per millisecond of `threads` threads that multiply for about `ns` nanoseconds: the sum
// over the threads of the rate of each thread's fastest call.
extern "C" int64_t labkit_peak_flop_ms(int32_t threads, int64_t ns) {
  using namespace labkit;
  double all = 0;
#pragma omp parallel num_threads(threads) reduction(+ : all)
  {
    double best = 0;
    for (int64_t begin = now_ns(), from = begin, now; from - begin < ns; from = now) {
      const double done = double(multiply_registers<Weight>());
      now = now_ns();
      best = done / double(now - from) > best ? done / double(now - from) : best;
    }
    all += best;
  }
  return int64_t(all * 1e6);
}
