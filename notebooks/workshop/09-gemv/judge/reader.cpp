// Reads the matrix of a call and computes nothing: how fast a product could be at best, called as the product is.

#include <cstdint>

extern "C" void read_only(const float* w, const float*, float* y, int64_t rows, int64_t columns) {
  const int64_t count = rows * columns, kStreams = 4, kVector = 16;
#pragma omp parallel for num_threads(2) schedule(static)
  for (int64_t part = 0; part < 2; ++part) {
    const int64_t size = count / 2 / kStreams / kVector * kVector;
    const float* begin = w + part * (count / 2);
    float sums[kStreams][kVector] = {};
    for (int64_t i = 0; i < size; i += kVector) {
      for (int64_t s = 0; s < kStreams; ++s) {
        for (int64_t k = 0; k < kVector; ++k) sums[s][k] += begin[s * size + i + k];
      }
    }
    y[part] = sums[0][0] + sums[1][0] + sums[2][0] + sums[3][0];
  }
}
