// Region 1: norm, Q, K, V GEMM and bias in one pass over the weights, then rotary embedding and the append to the KV
// cache.
#pragma once

#include "../gemm/cpp_impl.cpp"

#include "../addend.h"
#include "../int8_cache.h"

namespace labkit {

// Normalised rows in the GEMM's type, and the residual that they came from. With one row every thread makes its own
// copy: a norm of a few thousand numbers takes less time than a barrier. More rows are split over the threads and
// shared, with a barrier at the end.
template <class T>
struct Normalised {
  const Activation<T>* x;
  int64_t stride;
  const float* residual;
  int64_t residual_stride;
};

// x = norm(h + addend). The addend is whole, or consists of the parts of all ranks, which are added up in the same
// pass. The residual is the sum, or x itself if the model takes it after the norm.
template <class T>
Normalised<T> normalised_rows(Team& team, int thread, const Norm& norm, const float* h, int64_t h_stride,
                              const Addend& addend, bool residual_from_norm, int64_t rows, int64_t hidden,
                              int64_t stride, Activation<T>* shared_x, float* shared_residual, ThreadScratch& scratch) {
  const int64_t padded = padded_depth<T>(hidden);
  const bool own = rows == 1;
  const size_t floats = size_t(stride);
  float* work = scratch.rows.get<float>(3 * floats);  // the normalised row, then (own only) the residual and x
  Activation<T>* x = own ? reinterpret_cast<Activation<T>*>(work + 2 * floats) : shared_x;
  float* residual = own ? work + floats : shared_residual;
  const bool adds = addend.rows.count, keep_sum = adds || residual_from_norm;
  const Range mine = own ? Range{0, 1} : team.share(rows, thread);
  for (int64_t m = mine.begin; m < mine.end; ++m) {
    const float* row = h + m * h_stride;
    if (adds) {
      add_row(addend, m, hidden, row, residual + m * stride);
      row = residual + m * stride;
    }
    normalise(norm, row, hidden, work);
    if (residual_from_norm) std::memcpy(residual + m * stride, work, size_t(hidden) * 4);
    to_activation(work, hidden, padded, x + m * stride);
  }
  if (!own) team.barrier();
  return {x, stride, keep_sum ? residual : h, keep_sum ? stride : h_stride};
}

inline void rms_scale(const float* weight, float eps, int64_t n, float* x) {
  const Norm norm{kRmsNorm, eps, weight, nullptr};
  normalise(norm, x, n, x);
}

inline void rotate(const Rotary& rotary, int32_t table, int32_t position, float* x) {
  const int half = rotary.dim / 2;
  const int64_t row = table * rotary.table + int64_t(position) * half;
  const float *cosine = rotary.cosine + row, *sine = rotary.sine + row;
  const int step = rotary.interleaved ? 2 : 1, other = rotary.interleaved ? 1 : half;
  for (int i = 0; i < half; ++i) {
    const float a = x[i * step], b = x[i * step + other];
    x[i * step] = a * cosine[i] - b * sine[i];
    x[i * step + other] = b * cosine[i] + a * sine[i];
  }
}

template <class T>
void append(const float* x, int dim, int padded_dim, T* slot) {
  for (int i = 0; i < dim; ++i) from_float(x[i], slot + i);
  for (int i = dim; i < padded_dim; ++i) from_float(0.0f, slot + i);
}

// Rotates queries in place; rotates and appends keys, appends values. qkv: [rows][stride], query, key, value heads.
template <class T>
void rotate_and_append(const Team& team, int thread, const QkvWeights& weights, const Rotary& rotary,
                       const Heads& heads, const Rows& rows, const Cache& cache, float* qkv, int64_t stride) {
  const int64_t heads_in_row = heads.query + 2 * heads.kv;
  const Range mine = team.share(int64_t(rows.batch) * rows.tokens * heads_in_row, thread);
  for (int64_t item = mine.begin; item < mine.end; ++item) {
    const int64_t m = item / heads_in_row, head = item % heads_in_row;
    float* x = qkv + m * stride + head * heads.dim;
    const bool is_value = head >= heads.query + heads.kv, is_query = head < heads.query;
    if (!is_value) {
      const float* norm = is_query ? weights.q_norm : weights.k_norm;
      if (norm && !weights.whole_norms) rms_scale(norm, weights.qk_eps, heads.dim, x);
      if (rotary.dim) rotate(rotary, weights.table, rows.positions[m], x);
    }
    if (is_query) continue;
    const int64_t kv_head = (head - heads.query) % heads.kv;
    const int64_t slot = ((m / rows.tokens) * heads.kv + kv_head) * cache.capacity + cache.past + m % rows.tokens;
    void* to = is_value ? cache.values : cache.keys;
    if (cache.key_scales)
      quantise(x, heads.dim, heads.padded_dim, static_cast<int8_t*>(to) + slot * heads.padded_dim,
               (is_value ? cache.value_scales : cache.key_scales) + slot);
    else
      append(x, heads.dim, heads.padded_dim, static_cast<T*>(to) + slot * heads.padded_dim);
  }
}

// Norms over all query heads, and all key heads, of each row. Ends after a barrier.
inline void norm_whole(Team& team, int thread, const QkvWeights& weights, const Heads& heads, int64_t rows, float* qkv,
                       int64_t stride) {
  const int64_t queries = int64_t(heads.query) * heads.dim, keys = int64_t(heads.kv) * heads.dim;
  const Range mine = team.share(2 * rows, thread);
  for (int64_t item = mine.begin; item < mine.end; ++item) {
    float* row = qkv + item / 2 * stride;
    if (item % 2)
      rms_scale(weights.k_norm, weights.qk_eps, keys, row + queries);
    else
      rms_scale(weights.q_norm, weights.qk_eps, queries, row);
  }
  team.barrier();
}

// The region: from normalised rows to queries in `qkv`, and keys and values in the cache. Ends after a barrier. Another
// barrier is before the rotation, because a head's numbers come from blocks that other threads may have multiplied.
template <class T>
void qkv_region(Team& team, int thread, const QkvWeights& weights, const Rotary& rotary, const Heads& heads,
                const Rows& rows, const Cache& cache, const Normalised<T>& input, float* qkv, int64_t stride,
                ThreadScratch& scratch) {
  const int64_t count = int64_t(rows.batch) * rows.tokens;
  gemm_into<T>(team, thread, weights.proj, input.x, input.stride, count, qkv, stride, scratch);
  team.barrier();
  if (weights.whole_norms) norm_whole(team, thread, weights, heads, count, qkv, stride);
  rotate_and_append<Unquantised<T>>(team, thread, weights, rotary, heads, rows, cache, qkv, stride);
  team.barrier();
}

}  // namespace labkit

// hidden: [rows][hidden]. queries: [rows][query heads * dim], rotated. residual: [rows][hidden], to which region 3
// adds.
extern "C" int64_t labkit_qkv_gemm(const labkit::QkvWeights* weights, const labkit::Rotary* rotary,
                                   const labkit::Heads* heads, const labkit::Rows* rows, const labkit::Cache* cache,
                                   const float* h, int32_t from_norm, float* queries, float* residual,
                                   int32_t threads) {
  using namespace labkit;
  return guarded([&]() -> int64_t {
    Team team(threads);
    const int64_t count = int64_t(rows->batch) * rows->tokens, hidden = weights->proj.inputs,
                  stride = row_stride(hidden);
    const int64_t qkv_stride = row_stride(weights->proj.outputs), width = int64_t(heads->query) * heads->dim;
    CallBuffers& buffers = call_buffers();
    Act* x = buffers.x.get<Act>(count * stride);
    float* shared_residual = buffers.residual.get<float>(count * stride);
    float* qkv = buffers.wide.get<float>(count * qkv_stride);
    run_team(team, threads, [&](int thread) {
      ThreadScratch& scratch = thread_scratch();
      const Normalised<Weight> input = normalised_rows<Weight>(team, thread, weights->norm, h, hidden, {}, from_norm,
                                                               count, hidden, stride, x, shared_residual, scratch);
      qkv_region<Weight>(team, thread, *weights, *rotary, *heads, *rows, *cache, input, qkv, qkv_stride, scratch);
      if (thread == 0)
        for (int64_t m = 0; m < count; ++m) {
          std::memcpy(queries + m * width, qkv + m * qkv_stride, size_t(width) * 4);
          std::memcpy(residual + m * hidden, input.residual + m * input.residual_stride, size_t(hidden) * 4);
        }
    });
    return 0;
  });
}
