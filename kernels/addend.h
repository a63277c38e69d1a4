// Rows that are added to the residual: the output of attention or MLP.
#pragma once

#include "all_reduce/exchange.h"
#include "norm.h"

namespace labkit {

struct Addend {
  Parts rows;                   // no parts: nothing is added
  const float* bias = nullptr;  // may be null
  Norm norm = {};               // of rows + bias
};

// out = row + norm(addend's row m + bias). With a norm, out is not row.
inline void add_row(const Addend& addend, int64_t m, int64_t n, const float* row, float* out) {
  const float* bias = addend.bias;
  if (addend.norm.kind != kNoNorm) {
    add_parts(addend.rows, m, 0, n, [=](int64_t i, float sum) { out[i] = bias ? sum + bias[i] : sum; });
    normalise(addend.norm, out, n, out);
    for (int64_t i = 0; i < n; ++i) out[i] += row[i];
  } else if (bias) {
    add_parts(addend.rows, m, 0, n, [=](int64_t i, float sum) { out[i] = row[i] + sum + bias[i]; });
  } else {
    add_parts(addend.rows, m, 0, n, [=](int64_t i, float sum) { out[i] = row[i] + sum; });
  }
}

}  // namespace labkit
