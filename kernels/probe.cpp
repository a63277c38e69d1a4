// Reads memory as the GEMM does, one forward stream per thread, and does nothing else. This is the limit that decode
// steps are compared with.
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
    // Two sums for each vector. With one, Intel's cores execute so far ahead that loads overtake the prefetches.
    vf once[4] = {}, twice[4] = {};
    for (int64_t step = steps * thread / team; step < steps * (thread + 1) / team; ++step) {
      const char* from = data + step * kStep;
      for (int u = 0; u < 4; ++u) prefetch_once(from + kPrefetchBytes + u * kLine);
      for (int u = 0; u < int(kStep / sizeof(vf)); ++u) {
        const vf read = load(reinterpret_cast<const float*>(from) + u * kWidth);
        once[u % 4] += read;
        twice[u % 4] += read * 2.0f;
      }
    }
    for (int u = 1; u < 4; ++u) once[0] += once[u], twice[0] += twice[u];
    sink = sum(once[0] + twice[0]);
  }
  return now_ns() - begin;
}
