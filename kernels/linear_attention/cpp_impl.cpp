// One token of a layer of linear attention: the causal convolution over the last tokens, and the gated delta rule.
#pragma once

#include "../mlp_gemm/cpp_impl.cpp"

#include <cmath>
#include <type_traits>

#include "../residual_add/cpp_impl.cpp"

namespace labkit {

constexpr float kL2Epsilon = 1e-6f;  // of queries and keys, as in flash-linear-attention and transformers

// out[channel] = sum of the last `taps` numbers of (state, x), each times its weight. The state then ends with x.
template <class T>
void convolve(const float* x, T* state, const T* weight, const T* bias, int64_t first, Range channels, int64_t kept,
              int64_t taps, float* out) {
  for (int64_t c = channels.begin; c < channels.end; ++c) {
    T* last = state + (first + c) * kept;
    const T* tap = weight + c * taps;
    T now;
    from_float(x[first + c], &now);
    float sum = bias ? to_float(bias[c]) : 0.0f;
    for (int64_t j = 0; j + 1 < taps; ++j) sum += to_float(last[kept + 1 - taps + j]) * to_float(tap[j]);
    out[first + c] = sum + to_float(now) * to_float(tap[taps - 1]);
    for (int64_t j = 0; j + 1 < kept; ++j) last[j] = last[j + 1];
    last[kept - 1] = now;
  }
}

// y = x / |x| * factor, or x * factor.
inline void directed(const float* x, int64_t n, bool normed, float factor, float* y) {
  if (normed) factor /= std::sqrt(mean_square(x, n, 0.0f) * float(n) + kL2Epsilon);
  for (int64_t i = 0; i < n; ++i) y[i] = x[i] * factor;
}

// Columns of a head's state [keys][values], and as many numbers of its output. The first pass leaves the columns in the
// cache for the second one.
template <int kVectors>
void delta_columns(const float* q, const float* k, const float* v, float decay, float beta, const float* state,
                   int64_t keys, int64_t values, float* next, float* out) {
  vf memory[kVectors] = {}, sum[kVectors] = {}, delta[kVectors];
  for (int64_t row = 0; row < keys; ++row)
    for (int u = 0; u < kVectors; ++u) memory[u] += load(state + row * values + u * kWidth) * k[row];
  for (int u = 0; u < kVectors; ++u) delta[u] = (load(v + u * kWidth) - memory[u] * decay) * beta;
  for (int64_t row = 0; row < keys; ++row)
    for (int u = 0; u < kVectors; ++u) {
      const vf now = load(state + row * values + u * kWidth) * decay + delta[u] * k[row];
      store(next + row * values + u * kWidth, now);
      sum[u] += now * q[row];
    }
  for (int u = 0; u < kVectors; ++u) store(out + u * kWidth, sum[u]);
}

inline void delta_column(const float* q, const float* k, float v, float decay, float beta, const float* state,
                         int64_t keys, int64_t values, float* next, float* out) {
  float memory = 0.0f, sum = 0.0f;
  for (int64_t row = 0; row < keys; ++row) memory += state[row * values] * k[row];
  const float delta = (v - memory * decay) * beta;
  for (int64_t row = 0; row < keys; ++row) {
    next[row * values] = state[row * values] * decay + delta * k[row];
    sum += next[row * values] * q[row];
  }
  *out = sum;
}

inline void delta_head(const float* q, const float* k, const float* v, float decay, float beta, const float* state,
                       int64_t keys, int64_t values, float* next, float* out) {
  int64_t i = 0;
  for (; i + 4 * kWidth <= values; i += 4 * kWidth)
    delta_columns<4>(q, k, v + i, decay, beta, state + i, keys, values, next + i, out + i);
  for (; i + kWidth <= values; i += kWidth)
    delta_columns<1>(q, k, v + i, decay, beta, state + i, keys, values, next + i, out + i);
  for (; i < values; ++i) delta_column(q, k, v[i], decay, beta, state + i, keys, values, next + i, out + i);
}

}  // namespace labkit

extern "C" int64_t labkit_conv_step(const float* x, void* state, const void* weight, const void* bias, int64_t batch,
                                    int64_t channels, int64_t kept, int64_t taps, int32_t type, int32_t with_silu,
                                    float* out, int32_t threads) {
  using namespace labkit;
  return guarded([&]() -> int64_t {
    if (batch * channels < kWorthATeam) threads = 1;
    Team team(threads);
    run_team(team, threads, [&](int thread) {
      const Range mine = team.share(channels, thread);
      const auto of = [&](auto* typed) {
        using T = std::remove_pointer_t<decltype(typed)>;
        for (int64_t b = 0; b < batch; ++b) {
          convolve(x, static_cast<T*>(state), static_cast<const T*>(weight), static_cast<const T*>(bias), b * channels,
                   mine, kept, taps, out);
          if (with_silu) silu(out + b * channels + mine.begin, mine.end - mine.begin);
        }
      };
      if (type == 0) of(static_cast<float*>(nullptr));
      if (type == 1) of(static_cast<bf16*>(nullptr));
      if (type == 2) of(static_cast<fp16*>(nullptr));
    });
    return 0;
  });
}

extern "C" int64_t labkit_delta_step(const float* q, const float* k, const float* v, const float* log_decay,
                                     const float* beta, const float* state, int64_t batch, int64_t key_heads,
                                     int64_t heads, int64_t keys, int64_t values, int32_t normed, float* next,
                                     float* out, int32_t threads) {
  using namespace labkit;
  return guarded([&]() -> int64_t {
    if (batch * heads * keys * values < kWorthATeam) threads = 1;
    Team team(threads);
    run_team(team, threads, [&](int thread) {
      float* query = thread_scratch().head.get<float>(size_t(2 * keys));
      float* key = query + keys;
      const Range mine = team.share(batch * heads, thread);
      for (int64_t h = mine.begin; h < mine.end; ++h) {
        const int64_t from = (h / heads * key_heads + h % heads / (heads / key_heads)) * keys;
        directed(q + from, keys, normed, 1.0f / std::sqrt(float(keys)), query);
        directed(k + from, keys, normed, 1.0f, key);
        delta_head(query, key, v + h * values, std::exp(log_decay[h]), beta[h], state + h * keys * values, keys, values,
                   next + h * keys * values, out + h * values);
      }
    });
    return 0;
  });
}
