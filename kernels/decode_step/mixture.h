// The mixture of experts of a layer in a step, in place of an MLP that every row passes.
#pragma once

#include <vector>

#include "step.h"

namespace labkit {

// out: [rows][stride] = the mixture, and the shared expert if there is one. Ends after a barrier.
inline void mixture_step(Team& team, int thread, const Layer& layer, const Normalised<Weight>& input, int64_t rows,
                         int64_t hidden, Workspace& work, int64_t act_stride, float* out, int64_t stride, Clock& clock,
                         ThreadScratch& scratch) {
  const Mixture& mixture = *layer.mixture;
  const MixtureMemory& memory = *work.mixture;
  const DenseMlp& shared = layer.mlp;
  if (mixture.shared_gate.weight)
    gemm_into<Weight>(team, thread, mixture.shared_gate, input.x, input.stride, rows, memory.gates, 1, scratch);
  route_rows(team, thread, mixture.router, input, rows, memory.logits, memory.chosen, memory.shares, scratch);
  const int64_t per_row = mixture.router.chosen;
  if (thread == 0) {
    ExpertTable table(mixture.experts.count, memory.experts.table);
    table.fill(memory.chosen, rows * per_row, mixture.first);
    if (memory.experts_read) *memory.experts_read += *table.active_count;
    if (memory.noted) std::copy(memory.chosen, memory.chosen + rows * per_row, memory.noted);
  }
  team.barrier();
  clock.stamp(LayerStage::kRoute);

  const size_t row_bytes = size_t(padded_depth<Weight>(hidden)) * sizeof(Act);
  experts_region(
      team, thread, mixture.experts, memory.shares, rows, per_row, memory.experts,
      [&](int64_t row, Act* x) { std::memcpy(x, input.x + row * input.stride, row_bytes); }, out, stride, scratch);
  team.barrier();
  clock.stamp(LayerStage::kExperts);
  if (!shared.region.up.weight) return;

  mlp_region<Weight>(team, thread, shared.region, input, rows, work.act, act_stride, scratch);
  clock.stamp(LayerStage::kMlp);
  gemm_into<Weight>(team, thread, shared.out, work.act, act_stride, rows, work.normed, stride, scratch);
  team.barrier();
  const Range columns = team.share(hidden, thread);
  for (int64_t m = 0; m < rows; ++m) {
    const float share = mixture.shared_gate.weight ? 1.0f / (1.0f + std::exp(-memory.gates[m])) : 1.0f;
    for (int64_t i = columns.begin; i < columns.end; ++i) out[m * stride + i] += share * work.normed[m * stride + i];
  }
  team.barrier();
  clock.stamp(LayerStage::kMlpOut);
}

// A copy of a mixture with other places of its experts' matrices.
class MovedMixture {
 public:
  // move(linear) changes the place of a matrix.
  template <class Move>
  const Mixture* moved(const Mixture& mixture, Move&& move) {
    const ExpertMlps& experts = mixture.experts;
    mixture_ = mixture;
    regions_.assign(experts.regions, experts.regions + experts.count);
    outs_.assign(experts.outs, experts.outs + experts.count);
    for (MlpWeights& region : regions_) move(region.up);
    for (Linear& out : outs_) move(out);
    for (Linear* linear : {&mixture_.router.matrix, &mixture_.shared_gate}) move(*linear);
    mixture_.experts.regions = regions_.data();
    mixture_.experts.outs = outs_.data();
    return &mixture_;
  }

 private:
  Mixture mixture_;
  std::vector<MlpWeights> regions_;
  std::vector<Linear> outs_;
};

}  // namespace labkit
