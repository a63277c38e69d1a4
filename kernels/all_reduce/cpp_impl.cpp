// Sums and gathers over the ranks that share memory, as single calls: for steps that go op by op, and for measuring the
// exchange.
#pragma once

#include "exchange.h"

extern "C" void labkit_all_reduce(labkit::Exchange* exchange, const float* x, int64_t count, float* out) {
  using namespace labkit;
  Team alone(1);
  Ranks ranks(exchange);
  const int64_t most = ranks.room() / int64_t(sizeof(float));
  for (int64_t begin = 0; begin < count; begin += most) {
    const int64_t n = count - begin < most ? count - begin : most;
    std::memcpy(ranks.own<float>(), x + begin, size_t(n) * sizeof(float));
    ranks.meet(alone, 0, n * int64_t(sizeof(float)));
    add_parts(Parts(ranks, n), 0, 0, n, [&](int64_t i, float sum) { out[begin + i] = sum; });
  }
}

// out: [ranks][bytes].
extern "C" void labkit_all_gather(labkit::Exchange* exchange, const char* x, int64_t bytes, char* out) {
  using namespace labkit;
  Team alone(1);
  Ranks ranks(exchange);
  for (int64_t begin = 0; begin < bytes; begin += ranks.room()) {
    const int64_t n = bytes - begin < ranks.room() ? bytes - begin : ranks.room();
    std::memcpy(ranks.own<char>(), x + begin, size_t(n));
    ranks.meet(alone, 0, n);
    for (int r = 0; r < ranks.count(); ++r) std::memcpy(out + r * bytes + begin, ranks.of<char>(r), size_t(n));
  }
}
