// Region 3: attention bias, residual and norm (normalised_rows), then the first MLP matrix with bias and activation.
// The two matrices of a gated MLP are interleaved by half blocks, 16 rows of gate and 16 of up. So a thread has both
// factors of an output in the same block, and multiplies them before anything is written to memory.
#pragma once

#include "../qkv_gemm/cpp_impl.cpp"

namespace labkit {

constexpr float kSwigluSlope = 1.702f, kSwigluLimit = 7.0f;

inline vf activate(int32_t kind, vf x) {
  switch (kind) {
    case kGelu:
      return 0.5f * x * (1.0f + erf(x * 0.70710678118654752f));
    case kGeluTanh:
      // 0.5 x (1 + tanh(u)) = x / (1 + exp(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
      return x / (1.0f + exp(-1.5957691216057308f * (x + 0.044715f * x * x * x)));
    case kSilu:
      return x / (1.0f + exp(-x));
    case kReluSquared:
      return x > 0.0f ? x * x : (x != x ? x : vf{});
    default:
      return x > 0.0f ? x : (x != x ? x : vf{});
  }
}

// The product of a gated MLP. kClampedSwiglu is GPT-OSS'; a NaN stays one.
inline vf gated_product(int32_t kind, vf gate, vf up) {
  if (kind != kClampedSwiglu) return activate(kind, gate) * up;
  const vf most = broadcast(kSwigluLimit), least = -most;
  gate = gate > most ? most : gate;
  up = up > most ? most : up < least ? least : up;
  return gate / (1.0f + exp(-kSwigluSlope * gate)) * (up + 1.0f);
}

inline void silu(float* x, int64_t n) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store(x + i, activate(kSilu, load(x + i)));
  for (; i < n; ++i) x[i] = x[i] / (1.0f + std::exp(-x[i]));
}

// This thread's part of out[rows][out_stride] = activation(x * up^T + bias), or activation(gate) * up.
template <class T, class Deal>
void mlp_part(Deal&& deal, const MlpWeights& weights, const Activation<T>* x, int64_t ldx, int64_t rows,
              Activation<T>* out, int64_t out_stride, ThreadScratch& scratch) {
  const Linear& up = weights.up;
  const int64_t width = weights.gated ? up.outputs / 2 : up.outputs;
  gemm_part<T>(deal, up, x, ldx, rows, scratch, [&](int64_t block, float* acc) {
    for (int64_t m = 0; m < rows; ++m) {
      float* row = acc + m * kBlock;
      if (up.bias)
        for (int i = 0; i < kBlock; ++i) row[i] += up.bias[block * kBlock + i];
      if (weights.gated) {
        for (int i = 0; i < kBlock / 2; i += kWidth)
          store(row + i, gated_product(weights.activation, load(row + i), load(row + kBlock / 2 + i)));
      } else {
        for (int i = 0; i < kBlock; i += kWidth) store(row + i, activate(weights.activation, load(row + i)));
      }
      const int64_t columns = weights.gated ? kBlock / 2 : kBlock, first = block * columns;
      const int64_t count = width - first < columns ? width - first : columns;
      const int64_t end = first + count == width ? padded_depth<T>(width) - first : count;
      if (count > 0) to_activation(row, count, end, out + m * out_stride + first);
    }
  });
}

// The region, on all threads. Ends after a barrier.
template <class T>
void mlp_region(Team& team, int thread, const MlpWeights& weights, const Normalised<T>& input, int64_t rows,
                Activation<T>* out, int64_t out_stride, ThreadScratch& scratch) {
  mlp_part<T>(TeamDeal{team, thread}, weights, input.x, input.stride, rows, out, out_stride, scratch);
  team.barrier();
}

}  // namespace labkit

// x = norm(h + addend_norm(addend + bias)); act: [rows][width] = activation(x * up^T + bias); residual: [rows][hidden].
// addend may be null.
extern "C" int64_t labkit_mlp_gemm(const labkit::MlpWeights* weights, const float* h, const float* addend,
                                   const float* bias, int32_t from_norm, int64_t rows, float* act, float* residual,
                                   int32_t threads) {
  using namespace labkit;
  return guarded([&]() -> int64_t {
    Team team(threads);
    const int64_t hidden = weights->up.inputs, stride = row_stride(hidden);
    const int64_t padded = weights->gated ? weights->up.outputs / 2 : weights->up.outputs,
                  act_stride = row_stride(padded);
    CallBuffers& buffers = call_buffers();
    Act* x = buffers.x.get<Act>(rows * stride);
    float* shared_residual = buffers.residual.get<float>(rows * stride);
    Act* staged = buffers.context.get<Act>(rows * act_stride);
    run_team(team, threads, [&](int thread) {
      ThreadScratch& scratch = thread_scratch();
      const Normalised<Weight> input = normalised_rows<Weight>(
          team, thread, weights->norm, h, hidden, {Parts(addend, hidden), bias, weights->addend_norm}, from_norm, rows,
          hidden, stride, x, shared_residual, scratch);
      mlp_region<Weight>(team, thread, *weights, input, rows, staged, act_stride, scratch);
      const Range mine = team.share(rows, thread);
      for (int64_t m = mine.begin; m < mine.end; ++m)
        for (int64_t i = 0; i < padded; ++i) act[m * padded + i] = to_float(staged[m * act_stride + i]);
      if (thread == 0)
        for (int64_t m = 0; m < rows; ++m)
          std::memcpy(residual + m * hidden, input.residual + m * input.residual_stride, size_t(hidden) * 4);
    });
    return 0;
  });
}

// y: [rows][outputs] = act * down^T + bias, with act as above and nothing added to h: a whole MLP.
extern "C" int64_t labkit_mlp(const labkit::MlpWeights* weights, const labkit::Linear* down, const float* h,
                              int64_t rows, float* y, int32_t threads) {
  using namespace labkit;
  return guarded([&]() -> int64_t {
    Team team(threads);
    const int64_t hidden = weights->up.inputs, stride = row_stride(hidden);
    const int64_t act_stride = row_stride(weights->gated ? weights->up.outputs / 2 : weights->up.outputs);
    CallBuffers& buffers = call_buffers();
    Act* x = buffers.x.get<Act>(rows * stride);
    float* residual = buffers.residual.get<float>(rows * stride);
    Act* act = buffers.context.get<Act>(rows * act_stride);
    run_team(team, threads, [&](int thread) {
      ThreadScratch& scratch = thread_scratch();
      const Normalised<Weight> input = normalised_rows<Weight>(team, thread, weights->norm, h, hidden, {}, false, rows,
                                                               hidden, stride, x, residual, scratch);
      mlp_region<Weight>(team, thread, *weights, input, rows, act, act_stride, scratch);
      gemm_into<Weight>(team, thread, *down, act, act_stride, rows, y, down->outputs, scratch);
    });
    return 0;
  });
}
