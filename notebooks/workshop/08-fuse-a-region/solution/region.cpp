// The region in one pass: the norm is computed once by one thread, since it is short, and one team of two threads computes
// the outputs. Each output is finished while it is in a register: product, bias, activation.

#include <cmath>
#include <cstdint>

constexpr int64_t kMostHidden = 4096;

static float dot(const float* a, const float* b, int64_t count) {
  float sums[64] = {};
  int64_t i = 0;
  for (; i + 64 <= count; i += 64) {
    for (int64_t k = 0; k < 64; ++k) sums[k] += a[i + k] * b[i + k];
  }
  float sum = 0;
  for (float part : sums) sum += part;
  for (; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

static float gelu(float v) { return v / (1 + std::exp(-1.5957691216f * (v + 0.044715f * v * v * v))); }

extern "C" void region(const float* x, const float* bias, const float* residual,  // [hidden]
                       const float* gain, const float* shift,                     // [hidden]
                       const float* w,                                            // [inner][hidden]
                       const float* w_bias,                                       // [inner]
                       float* summed,                                             // [hidden]
                       float* y,                                                  // [inner]
                       int64_t hidden, int64_t inner) {
  alignas(64) float normed[kMostHidden];
  float mean = 0, variance = 0;
  for (int64_t i = 0; i < hidden; ++i) mean += summed[i] = x[i] + bias[i] + residual[i];
  mean /= hidden;
  for (int64_t i = 0; i < hidden; ++i) variance += (summed[i] - mean) * (summed[i] - mean);
  const float scale = 1 / std::sqrt(variance / hidden + 1e-5f);
  for (int64_t i = 0; i < hidden; ++i) normed[i] = (summed[i] - mean) * scale * gain[i] + shift[i];

#pragma omp parallel for num_threads(2) schedule(static)
  for (int64_t r = 0; r < inner; ++r) y[r] = gelu(dot(normed, w + r * hidden, hidden) + w_bias[r]);
}
