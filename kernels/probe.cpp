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
    constexpr int64_t kLine = 4 * sizeof(vf);
    const int64_t lines = bytes / kLine, team = omp_get_num_threads(), thread = omp_get_thread_num();
    vf total[4] = {};
    for (int64_t line = lines * thread / team; line < lines * (thread + 1) / team; ++line)
      for (int u = 0; u < 4; ++u) total[u] += load(reinterpret_cast<const float*>(data + line * kLine) + u * kWidth);
    sink = sum((total[0] + total[1]) + (total[2] + total[3]));
  }
  return now_ns() - begin;
}
