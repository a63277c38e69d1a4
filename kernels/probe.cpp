// Reads memory as the GEMM does, one forward stream per thread, and nothing else: the limit that a decode step is held
// to.
#include "simd.h"
#include "team.h"

extern "C" int64_t labkit_read_ns(const char* data, int64_t bytes, int32_t threads) {
  using namespace labkit;
  static volatile float sink;
  const int64_t begin = now_ns();
#pragma omp parallel num_threads(threads)
  {
    constexpr int64_t kStep = 4 * kLine;
    const int64_t steps = bytes / kStep, team = omp_get_num_threads(), thread = omp_get_thread_num();
    vf total[4] = {};
    for (int64_t step = steps * thread / team; step < steps * (thread + 1) / team; ++step) {
      const char* from = data + step * kStep;
      for (int u = 0; u < 4; ++u) prefetch_once(from + u * kLine);
      for (int u = 0; u < int(kStep / sizeof(vf)); ++u)
        total[u % 4] += load(reinterpret_cast<const float*>(from) + u * kWidth);
    }
    sink = sum((total[0] + total[1]) + (total[2] + total[3]));
  }
  return now_ns() - begin;
}
