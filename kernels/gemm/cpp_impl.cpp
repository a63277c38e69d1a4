// out = x * weight^T + bias: attention output, second MLP matrix and LM head. For greedy steps the LM head gives the
// argmax instead of the logits, which are then never written.
#pragma once

#include "../norm.h"
#include "panels.h"

#ifndef LABKIT_WEIGHT
#define LABKIT_WEIGHT float  // storage type of the weights and the KV cache: one library per type
#endif

namespace labkit {

// This thread's part of out[rows][outputs] = x * weight^T (+ bias) (+ addend). `stride`: of out's and addend's rows.
template <class T>
void gemm_into(Team& team, int thread, const Linear& linear, const Activation<T>* x, int64_t ldx, int64_t rows,
               float* out, int64_t stride, ThreadScratch& scratch, const float* addend = nullptr) {
  gemm_part<T>(TeamDeal{team, thread}, linear, x, ldx, rows, scratch, [&](int64_t block, const float* acc) {
    const int64_t column = block * kBlock;
    const int64_t count = linear.outputs - column < kBlock ? linear.outputs - column : kBlock;
    alignas(64) float bias[kBlock] = {};
    if (linear.bias) std::memcpy(bias, linear.bias + column, size_t(count) * sizeof(float));
    for (int64_t m = 0; m < rows; ++m) {
      float* to = out + m * stride + column;
      const float *sums = acc + m * kBlock, *more = addend ? addend + m * stride + column : nullptr;
      if (count == kBlock)
        for (int i = 0; i < kBlock; i += kWidth) {
          const vf sum = load(sums + i) + load(bias + i);
          store(to + i, more ? sum + load(more + i) : sum);
        }
      else
        for (int64_t i = 0; i < count; ++i) to[i] = more ? sums[i] + bias[i] + more[i] : sums[i] + bias[i];
    }
  });
}

struct Best {
  float value;
  int64_t index;  // -1: no finite value yet

  // The first of equal values wins.
  bool loses_to(float other, int64_t at) const { return other > value || (other == value && at < index); }
};

// This thread's candidate for the argmax of each row; NaN is never a candidate.
template <class T>
void gemm_argmax(Team& team, int thread, const Linear& linear, const Activation<T>* x, int64_t ldx, int64_t rows,
                 Best* best, ThreadScratch& scratch) {
  for (int64_t m = 0; m < rows; ++m) best[m] = {-INFINITY, -1};
  gemm_part<T>(TeamDeal{team, thread}, linear, x, ldx, rows, scratch, [&](int64_t block, float* acc) {
    const int64_t column = block * kBlock;
    const int64_t count = linear.outputs - column < kBlock ? linear.outputs - column : kBlock;
    for (int64_t m = 0; m < rows; ++m) {
      float* row = acc + m * kBlock;
      if (linear.bias)
        for (int64_t i = 0; i < count; ++i) row[i] += linear.bias[column + i];
      for (int64_t i = count; i < kBlock; ++i) row[i] = -INFINITY;
      // Most blocks hold no new maximum, and a maximum of vectors shows that faster than a search for the index.
      vf top = broadcast(-INFINITY);  // `max` keeps it where the row has NaN
      for (int v = 0; v < kVectors; ++v) top = max(load(row + v * kWidth), top);
      if (!(maximum(top) >= best[m].value)) continue;
      for (int64_t i = 0; i < count; ++i)
        if (best[m].loses_to(row[i], column + i)) best[m] = {row[i], column + i};
    }
  });
}

// Copies rows of floats into the GEMM's activation type and row stride.
template <class T>
void stage_rows(const Team& team, int thread, const float* x, int64_t rows, int64_t depth, Activation<T>* out) {
  const Range mine = team.share(rows, thread);
  for (int64_t m = mine.begin; m < mine.end; ++m)
    to_activation(x + m * depth, depth, padded_depth<T>(depth), out + m * row_stride(depth));
}

using Weight = LABKIT_WEIGHT;
using Act = Activation<Weight>;
using Stored = Unquantised<Weight>;  // of the KV cache and the embeddings

// The calling thread's buffers for the single-op calls below. A whole step has its own workspace, and shares the memory
// of the attention's parts.
struct CallBuffers {
  Scratch x, h, residual, wide, context, attention;
};

static CallBuffers& call_buffers() {
  static thread_local CallBuffers buffers;
  return buffers;
}

}  // namespace labkit

extern "C" int64_t labkit_gemm(const labkit::Linear* linear, const float* x, int64_t rows, float* out,
                               int32_t threads) {
  using namespace labkit;
  return guarded([&]() -> int64_t {
    Team team(threads);
    const int64_t stride = row_stride(linear->inputs);
    Act* staged = call_buffers().x.get<Act>(rows * stride);
    run_team(team, threads, [&](int thread) {
      stage_rows<Weight>(team, thread, x, rows, linear->inputs, staged);
      team.barrier();
      gemm_into<Weight>(team, thread, *linear, staged, stride, rows, out, linear->outputs, thread_scratch());
    });
    return 0;
  });
}
