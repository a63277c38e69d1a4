// Attention of one query, block by block: the largest score so far, the sum of the weights and the weighted sum of the
// values stay in `state`. A block with a larger score scales what was added before.

#include <cmath>
#include <cstdint>

extern "C" void attend(const float* scores,  // [tokens]
                       const float* values,  // [tokens][width]
                       float* state,         // [width + 2]
                       float* out,           // [width]
                       int64_t tokens, int64_t width, int64_t first) {
  float& most = state[0];
  float& sum = state[1];
  float* added = state + 2;
  if (first) most = -INFINITY;

  float block_most = most;
  for (int64_t t = 0; t < tokens; ++t) block_most = std::fmax(block_most, scores[t]);
  const float scale = std::exp(most - block_most);  // 0 for the first block
  most = block_most;
  sum *= scale;
  for (int64_t c = 0; c < width; ++c) added[c] *= scale;

  for (int64_t t = 0; t < tokens; ++t) {
    const float weight = std::exp(scores[t] - most);
    sum += weight;
    for (int64_t c = 0; c < width; ++c) added[c] += weight * values[t * width + c];
  }
  for (int64_t c = 0; c < width; ++c) out[c] = added[c] / sum;
}
