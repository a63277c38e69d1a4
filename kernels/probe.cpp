// Only reads memory: each thread its share, in one of several ways. The fastest way is the limit that decode steps are
// compared with.
#include "peak.cpp"  // how fast this machine multiplies
#include "simd.h"
#include "team.h"

namespace labkit {

constexpr int64_t kProbeStep = 4 * kLine;  // bytes of one stream before the next stream's turn

// The sum of `steps` steps of each of kStreams consecutive streams.
template <int kStreams>
vf read_streams(Reading reading, const char* data, int64_t steps) {
  // Two sums for each vector. With one, Intel's cores execute so far ahead that loads overtake the prefetches.
  vf once[4] = {}, twice[4] = {};
  for (int64_t step = 0; step < steps; ++step)
    for (int stream = 0; stream < kStreams; ++stream) {
      const char* from = data + (stream * steps + step) * kProbeStep;
      for (int u = 0; u < 4; ++u) prefetch(reading.into, from + reading.ahead + u * kLine);
#pragma GCC unroll 16
      for (int u = 0; u < int(kProbeStep / sizeof(vf)); ++u) {
        const vf read = load(reinterpret_cast<const float*>(from) + u * kWidth);
        once[u % 4] += read;
        twice[u % 4] += read * 2.0f;
      }
    }
  for (int u = 1; u < 4; ++u) once[0] += once[u], twice[0] += twice[u];
  return once[0] + twice[0];
}

}  // namespace labkit

// Nanoseconds to read `bytes` from `data` once. `reading`: an index into kReadings; streams: 1, 2 or 4 of each thread.
extern "C" int64_t labkit_read_ns(const char* data, int64_t bytes, int32_t threads, int32_t reading, int32_t streams) {
  using namespace labkit;
  static volatile float sink;
  const Reading way = reading_of(reading);
  const int64_t begin = now_ns();
#pragma omp parallel num_threads(threads)
  {
    const int64_t team = omp_get_num_threads(), steps = bytes / kProbeStep / team / streams;
    const char* share = data + omp_get_thread_num() * streams * steps * kProbeStep;
    const vf total = streams == 4   ? read_streams<4>(way, share, steps)
                     : streams == 2 ? read_streams<2>(way, share, steps)
                                    : read_streams<1>(way, share, steps);
    sink = sum(total);
  }
  return now_ns() - begin;
}
