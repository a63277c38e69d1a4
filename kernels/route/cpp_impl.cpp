// The choice of experts: the rows of region 3 (attention bias, residual and norm), a logit for each expert, a score of
// each logit, and the largest of them. The shares of the chosen experts are made of their scores.
#pragma once

#include "../mlp_gemm/cpp_impl.cpp"

namespace labkit {

// Scores of logits: parts of their softmax, or their sigmoids.
class Scores {
 public:
  Scores(const float* logits, int64_t experts, bool sigmoid) : sigmoid_(sigmoid) {
    if (sigmoid) return;
    for (int64_t e = 0; e < experts; ++e) top_ = logits[e] > top_ ? logits[e] : top_;
    for (int64_t e = 0; e < experts; ++e) total_ += std::exp(logits[e] - top_);
  }

  float of(float logit) const { return sigmoid_ ? 1.0f / (1.0f + std::exp(-logit)) : std::exp(logit - top_) / total_; }

 private:
  const bool sigmoid_;
  float top_ = -INFINITY, total_ = 0.0f;
};

// The experts of one row, the largest first; of equal experts the first one. With a bias the score and the bias are
// compared, else the logits. Where one of these is NaN, all shares are. logits are overwritten.
inline void choose_experts(float* logits, int64_t experts, const Router& router, int64_t* chosen, float* shares) {
  const Scores scores(logits, experts, router.sigmoid);
  const float* const bias = router.choice_bias;
  const auto compared = [&](int64_t e) { return bias ? logits[e] + bias[e] : logits[e]; };
  bool is_nan = false;
  for (int64_t e = 0; e < experts; ++e) {
    if (bias) logits[e] = scores.of(logits[e]);
    is_nan = is_nan || std::isnan(compared(e));
  }
  float kept = 0.0f;
  for (int64_t k = 0; k < router.chosen; ++k) {
    int64_t best = 0;
    for (int64_t e = 1; e < experts; ++e)
      if (compared(e) > compared(best) || std::isnan(compared(best))) best = e;
    chosen[k] = best;
    shares[k] = bias ? logits[best] : scores.of(logits[best]);
    kept += shares[k];
    logits[best] = NAN;
  }
  const float factor = is_nan ? NAN : router.renormalised ? router.factor / kept : router.factor;
  for (int64_t k = 0; k < router.chosen; ++k) shares[k] *= factor;
}

// chosen, shares: [rows][router.chosen]. logits: [rows][experts], working memory. On all threads; ends after a barrier.
inline void route_rows(Team& team, int thread, const Router& router, const Normalised<Weight>& input, int64_t rows,
                       float* logits, int64_t* chosen, float* shares, ThreadScratch& scratch) {
  const int64_t experts = router.matrix.outputs;
  gemm_into<Weight>(team, thread, router.matrix, input.x, input.stride, rows, logits, experts, scratch);
  team.barrier();
  const Range mine = team.share(rows, thread);
  for (int64_t m = mine.begin; m < mine.end; ++m)
    choose_experts(logits + m * experts, experts, router, chosen + m * router.chosen, shares + m * router.chosen);
  team.barrier();
}

}  // namespace labkit

// x: [rows][hidden] = norm(residual), residual = h + addend_norm(addend + bias); addend may be null.
extern "C" int64_t labkit_route(const labkit::Router* router, const labkit::Norm* norm, const labkit::Norm* addend_norm,
                                const float* h, const float* addend, const float* bias, int64_t rows, float* x,
                                float* residual, int64_t* chosen, float* shares, int32_t threads) {
  using namespace labkit;
  return guarded([&]() -> int64_t {
    Team team(threads);
    const int64_t hidden = router->matrix.inputs, stride = row_stride(hidden);
    CallBuffers& buffers = call_buffers();
    Act* normed = buffers.x.get<Act>(size_t(rows * stride));
    float* shared_residual = buffers.residual.get<float>(size_t(rows * stride));
    float* logits = buffers.wide.get<float>(size_t(rows * router->matrix.outputs));
    run_team(team, threads, [&](int thread) {
      ThreadScratch& scratch = thread_scratch();
      const Normalised<Weight> input =
          normalised_rows<Weight>(team, thread, *norm, h, hidden, {Parts(addend, hidden), bias, *addend_norm}, false,
                                  rows, hidden, stride, normed, shared_residual, scratch);
      route_rows(team, thread, *router, input, rows, logits, chosen, shares, scratch);
      if (thread != 0) return;
      for (int64_t m = 0; m < rows; ++m) {
        std::memcpy(residual + m * hidden, input.residual + m * input.residual_stride, size_t(hidden) * 4);
        for (int64_t i = 0; i < hidden; ++i) x[m * hidden + i] = to_float(input.x[m * input.stride + i]);
      }
    });
    return 0;
  });
}
