// A mixture of experts: each row passes the MLPs that were chosen for it, and gets the weighted sum of their outputs.
//
// A table lists the choices in the order of the experts, so that every expert multiplies all of its rows at once and
// its matrices are read once. An expert that no row chose is not read. Nothing is dropped: an expert takes any number
// of rows.
#pragma once

#include "../mlp_gemm/cpp_impl.cpp"

namespace labkit {

// Lists the choices by expert, each in its row's order. order[begin[e] .. begin[e + 1]) are the places in `chosen` that
// hold e. Numbers that are no expert's are left out. `begin` has a number for each expert, and one more.
inline void sort_by_expert(const int64_t* chosen, int64_t choices, int64_t experts, int64_t* begin, int64_t* order) {
  const auto each = [&](auto&& use) {
    for (int64_t i = 0; i < choices; ++i)
      if (chosen[i] >= 0 && chosen[i] < experts) use(i, chosen[i]);
  };
  std::fill(begin, begin + experts + 1, 0);
  each([&](int64_t, int64_t expert) { ++begin[expert + 1]; });
  for (int64_t e = 0; e < experts; ++e) begin[e + 1] += begin[e];
  each([&](int64_t i, int64_t expert) { order[begin[expert]++] = i; });
  for (int64_t e = experts; e > 0; --e) begin[e] = begin[e - 1];
  begin[0] = 0;
}

// This thread's part of the outputs of one expert, times the shares that its rows give it, added to `y`. places: its
// rows' places in `chosen`.
template <class T>
void add_expert(Team& team, int thread, const Linear& out, const Activation<T>* act, int64_t act_stride,
                const int64_t* places, int64_t rows, const float* shares, int64_t per_row, float* y,
                ThreadScratch& scratch) {
  gemm_part<T>(team, thread, out, act, act_stride, rows, scratch, [&](int64_t block, const float* acc) {
    const int64_t column = block * kBlock;
    const int64_t count = out.outputs - column < kBlock ? out.outputs - column : kBlock;
    for (int64_t m = 0; m < rows; ++m) {
      float* to = y + places[m] / per_row * out.outputs + column;
      const float share = shares[places[m]], *sums = acc + m * kBlock;
      for (int64_t i = 0; i < count; ++i) to[i] += share * (out.bias ? sums[i] + out.bias[column + i] : sums[i]);
    }
  });
}

}  // namespace labkit

// y: [rows][outputs] = the sum over the choices of share * (act * out^T + bias), with act as in region 3. h:
// [rows][hidden]. chosen, shares: [rows][per_row].
extern "C" int64_t labkit_experts(const labkit::ExpertMlps* experts, const float* h, const int64_t* chosen,
                                  const float* shares, int64_t rows, int64_t per_row, float* y, int32_t threads) {
  using namespace labkit;
  return guarded([&]() -> int64_t {
    Team team(threads);
    const MlpWeights& first = experts->regions[0];
    const int64_t count = experts->count, outputs = experts->outs[0].outputs;
    const int64_t hidden = first.up.inputs, stride = row_stride(hidden), padded = padded_depth<Weight>(hidden);
    const int64_t act_stride = row_stride(first.gated ? first.up.outputs / 2 : first.up.outputs);
    CallBuffers& buffers = call_buffers();
    int64_t* begin = buffers.h.get<int64_t>(count + 1 + rows * per_row);
    int64_t* order = begin + count + 1;
    sort_by_expert(chosen, rows * per_row, count, begin, order);
    const int64_t choices = begin[count];
    Act* x = buffers.x.get<Act>(choices * stride);
    Act* act = buffers.context.get<Act>(choices * act_stride);
    run_team(team, threads, [&](int thread) {
      ThreadScratch& scratch = thread_scratch();
      const Range mine = team.share(choices, thread), cleared = team.share(rows * outputs, thread);
      for (int64_t i = mine.begin; i < mine.end; ++i)
        to_activation(h + order[i] / per_row * hidden, hidden, padded, x + i * stride);
      std::fill(y + cleared.begin, y + cleared.end, 0.0f);
      team.barrier();
      for (int64_t e = 0; e < count; ++e) {
        const int64_t at = begin[e], chosen_by = begin[e + 1] - at;
        if (chosen_by == 0) continue;
        const Normalised<Weight> input{x + at * stride, stride, nullptr, 0};
        mlp_region<Weight>(team, thread, experts->regions[e], input, chosen_by, act + at * act_stride, act_stride,
                           scratch);
      }
      for (int64_t e = 0; e < count; ++e) {
        const int64_t at = begin[e], chosen_by = begin[e + 1] - at;
        if (chosen_by == 0) continue;
        add_expert<Weight>(team, thread, experts->outs[e], act + at * act_stride, act_stride, order + at, chosen_by,
                           shares, per_row, y, scratch);
        team.barrier();
      }
    });
    return 0;
  });
}
