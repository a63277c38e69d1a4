// y = W x: the product that takes nearly all of a decode step at batch 1.
//
// Every number of W is read once and used once, so the memory decides how fast this can be. This version is right, and
// far from that limit. Reach 80 % of it with two threads. `#pragma omp parallel for num_threads(2)` makes them.

#include <cstdint>

extern "C" void gemv(const float* w,  // [rows][columns]
                     const float* x,  // [columns]
                     float* y,        // [rows]
                     int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; ++r) {
    float sum = 0;
    for (int64_t c = 0; c < columns; ++c) sum += w[r * columns + c] * x[c];
    y[r] = sum;
  }
}
