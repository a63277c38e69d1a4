// y = W x. Two threads share the rows, each a stretch of memory of its own. A row has 64 sums instead of one, so that
// additions do not wait for each other and the compiler can use vectors. W is fetched 6 KB ahead, since the processor's
// own prefetching stops at the end of each page.

#include <cstdint>

constexpr int64_t kSums = 64, kAhead = 1536;  // numbers

static float row(const float* w, const float* x, int64_t columns) {
  float sums[kSums] = {};
  int64_t c = 0;
  for (; c + kSums <= columns; c += kSums) {
    for (int64_t line = 0; line < kSums; line += 16) __builtin_prefetch(w + c + kAhead + line, 0, 2);
    for (int64_t i = 0; i < kSums; ++i) sums[i] += w[c + i] * x[c + i];
  }
  float sum = 0;
  for (int64_t i = 0; i < kSums; ++i) sum += sums[i];
  for (; c < columns; ++c) sum += w[c] * x[c];
  return sum;
}

extern "C" void gemv(const float* w,  // [rows][columns]
                     const float* x,  // [columns]
                     float* y,        // [rows]
                     int64_t rows, int64_t columns) {
#pragma omp parallel for num_threads(2) schedule(static)
  for (int64_t r = 0; r < rows; ++r) y[r] = row(w + r * columns, x, columns);
}
