// Region 4: adds output bias and residual in one pass. With a parallel residual also the attention output and its bias.
#pragma once

#include <initializer_list>

#include "../addend.h"
#include "../gemm/panels.h"

namespace labkit {

constexpr int64_t kWorthATeam = 32768;  // numbers: for fewer, waking a thread takes longer than adding them

// out = residual + a + b, each with its bias. Threads share the columns, and out may be residual. If b has a norm,
// there is no a, out is not residual, and threads share the rows.
inline void residual_share(const Team& team, int thread, const float* residual, int64_t residual_stride,
                           const Addend& a, const Addend& b, int64_t rows, int64_t hidden, float* out,
                           int64_t out_stride) {
  if (b.norm.kind != kNoNorm) {
    const Range mine = team.share(rows, thread);
    for (int64_t m = mine.begin; m < mine.end; ++m)
      add_row(b, m, hidden, residual + m * residual_stride, out + m * out_stride);
    return;
  }
  const auto [begin, end] = team.share(hidden, thread);
  for (int64_t m = 0; m < rows; ++m) {
    float* to = out + m * out_stride;
    const float* from = residual + m * residual_stride;
    if (to != from)
      for (int64_t i = begin; i < end; ++i) to[i] = from[i];
    for (const Addend* addend : {&a, &b}) {
      if (!addend->rows.count) continue;
      if (const float* bias = addend->bias)
        add_parts(addend->rows, m, begin, end, [=](int64_t i, float sum) { to[i] += sum + bias[i]; });
      else
        add_parts(addend->rows, m, begin, end, [=](int64_t i, float sum) { to[i] += sum; });
    }
  }
}

}  // namespace labkit

extern "C" int64_t labkit_residual_add(const float* residual, const float* a, const float* a_bias, const float* b,
                                       const float* b_bias, const labkit::Norm* b_norm, int64_t rows, int64_t hidden,
                                       float* out, int32_t threads) {
  using namespace labkit;
  return guarded([&]() -> int64_t {
    if (rows * hidden < kWorthATeam) threads = 1;
    Team team(threads);
    run_team(team, threads, [&](int thread) {
      residual_share(team, thread, residual, hidden, {Parts(a, hidden), a_bias}, {Parts(b, hidden), b_bias, *b_norm},
                     rows, hidden, out, hidden);
    });
    return 0;
  });
}
