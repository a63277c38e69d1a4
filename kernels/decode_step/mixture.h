// The mixture of experts of a layer in a step, in place of an MLP that every row passes.
#pragma once

#include <numeric>

#include "step.h"

namespace labkit {

// A layer whose experts are in a store.
struct StoredLayer {
  ExpertStore* store;  // null: the experts are in memory
  int64_t number;
};

// The experts of a layer in the waves of a store. Between two waves the step waits, which is a stage of its own.
class StoredWaves {
 public:
  StoredWaves(Team& team, int thread, const StoredLayer& at, PlacedExperts& placed, Clock& clock)
      : mlps(placed.mlps()), team_(team), thread_(thread), at_(at), placed_(placed), clock_(clock) {}

  Range next(const ExpertTable& table) {
    clock_.stamp(LayerStage::kExperts);
    if (thread_ == 0) {
      int64_t* const rest = table.active + end_;
      placed_.wave = at_.store->next_wave(rest);
      for (int64_t i = 0; i < placed_.wave; ++i) place(rest[i]);
    }
    team_.barrier();
    const Range wave{end_, end_ + placed_.wave};
    end_ = wave.end;
    clock_.stamp(LayerStage::kFetch);
    return wave;
  }

  const ExpertMlps mlps;

 private:
  void place(int64_t expert) {
    int64_t part = 0;
    for (Linear* linear : {&placed_.regions[size_t(expert)].up, &placed_.outs[size_t(expert)]})
      for (const void** at : {&linear->weight, &linear->scales}) {
        if (*at) *at = at_.store->part(at_.number, expert, part);
        ++part;
      }
  }

  Team& team_;
  const int thread_;
  const StoredLayer at_;
  PlacedExperts& placed_;
  Clock& clock_;
  int64_t end_ = 0;
};

// Tells the store a guess: the experts that the layer's router would choose if attention added nothing to the rows h.
// For many rows that is every expert. On all threads; the working memory of the experts is free before and after.
inline void guess_experts(Team& team, int thread, const StoredLayer& at, const Layer& layer, const float* h,
                          int64_t stride, int64_t rows, int64_t hidden, const Workspace& work, ThreadScratch& scratch) {
  const MixtureMemory& memory = *work.mixture;
  const Mixture& mixture = *layer.mixture;
  const Router& router = mixture.router;
  const int64_t choices = rows * router.chosen, experts = router.matrix.outputs;
  if (choices > kFewChoices) {
    if (thread != 0) return;
    std::vector<int64_t> all(size_t(mixture.experts.count));
    std::iota(all.begin(), all.end(), 0);
    at.store->guess(at.number, all.data(), mixture.experts.count);
    return;
  }
  const Range mine = team.share(rows, thread);
  for (int64_t m = mine.begin; m < mine.end; ++m) {
    float* const normed = work.normed + m * stride;
    normalise(layer.mlp.region.norm, h + m * stride, hidden, normed);
    to_activation(normed, hidden, padded_depth<Weight>(hidden), memory.experts.x + m * memory.experts.stride);
  }
  team.barrier();
  gemm_into<Weight>(team, thread, router.matrix, memory.experts.x, memory.experts.stride, rows, memory.logits, experts,
                    scratch);
  team.barrier();
  if (thread != 0) return;
  int64_t count = 0;
  for (int64_t m = 0; m < rows; ++m) {
    int64_t* const guessed = memory.guessed + count;
    choose_experts(memory.logits + m * experts, experts, router, guessed, memory.experts.parts);
    for (int64_t k = 0; k < router.chosen; ++k)
      if (const int64_t own = guessed[k] - mixture.first; own >= 0 && own < mixture.experts.count)
        memory.guessed[count++] = own;
  }
  at.store->guess(at.number, memory.guessed, count);
}

// out: [rows][stride] = the mixture, and the shared expert if there is one. Ends after a barrier.
inline void mixture_step(Team& team, int thread, const Layer& layer, const Normalised<Weight>& input, int64_t rows,
                         int64_t hidden, Workspace& work, int64_t act_stride, float* out, int64_t stride,
                         const StoredLayer& at, Clock& clock, ThreadScratch& scratch) {
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
    if (at.store) {
      at.store->want(at.number, table.active, *table.active_count, table.choices() > kFewChoices);
      work.placed->begin(mixture.experts);
    }
    if (memory.noted) std::copy(memory.chosen, memory.chosen + rows * per_row, memory.noted);
  }
  team.barrier();
  clock.stamp(LayerStage::kRoute);

  const size_t row_bytes = size_t(padded_depth<Weight>(hidden)) * sizeof(Act);
  const auto gather = [&](int64_t row, Act* x) { std::memcpy(x, input.x + row * input.stride, row_bytes); };
  const auto run = [&](auto&& waves) {
    experts_region(team, thread, waves, memory.shares, rows, per_row, memory.experts, gather, out, stride, scratch);
  };
  if (at.store)
    run(StoredWaves(team, thread, at, *work.placed, clock));
  else
    run(OneWave{mixture.experts});
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
