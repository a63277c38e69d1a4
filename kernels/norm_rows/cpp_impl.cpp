// LayerNorm or RMSNorm of rows, for models of which only parts run on the kernels.
#pragma once

#include "../mlp_gemm/cpp_impl.cpp"

#include "../residual_add/cpp_impl.cpp"

extern "C" int64_t labkit_norm_rows(const float* x, const labkit::Norm* norm, const float* gate, int64_t rows,
                                    int64_t width, float* out, int32_t threads) {
  using namespace labkit;
  return guarded([&]() -> int64_t {
    if (rows * width < kWorthATeam) threads = 1;
    Team team(threads);
    run_team(team, threads, [&](int thread) {
      const Range mine = team.share(rows, thread);
      for (int64_t row = mine.begin; row < mine.end; ++row) {
        float* to = out + row * width;
        if (!gate) {
          normalise(*norm, x + row * width, width, to);
          continue;
        }
        float* open = thread_scratch().rows.get<float>(size_t(width));
        std::memcpy(open, gate + row * width, size_t(width) * 4);
        silu(open, width);
        normalise(*norm, x + row * width, width, to);
        for (int64_t i = 0; i < width; ++i) to[i] *= open[i];
      }
    });
    return 0;
  });
}
