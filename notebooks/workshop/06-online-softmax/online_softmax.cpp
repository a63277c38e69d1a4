// Attention of one query, block by block.
//
// The scores of a query against all tokens do not fit into the cache, so they come in blocks. `attend` is called once
// for each block, in order, and sees a block only once. After each call `out` has to be the attention over all blocks
// so far:
//
//   out[c] = sum over tokens t of exp(score[t]) * value[t][c]  /  sum over tokens t of exp(score[t])
//
// `state` has room for width + 2 numbers. Keep nothing else between two calls of the same query. Before
// the first block of a query it holds zeros, and `first` is 1.
//
// This version is right for a single block of small scores. It goes wrong in two ways: which?

#include <cmath>
#include <cstdint>

extern "C" void attend(const float* scores,  // [tokens]
                       const float* values,  // [tokens][width]
                       float* state,         // [width + 2]
                       float* out,           // [width]
                       int64_t tokens, int64_t width, int64_t first) {
  (void)state, (void)first;
  float sum = 0;
  for (int64_t c = 0; c < width; ++c) out[c] = 0;
  for (int64_t t = 0; t < tokens; ++t) {
    const float weight = std::exp(scores[t]);
    sum += weight;
    for (int64_t c = 0; c < width; ++c) out[c] += weight * values[t * width + c];
  }
  for (int64_t c = 0; c < width; ++c) out[c] /= sum;
}
