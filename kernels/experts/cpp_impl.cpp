// A mixture of experts: each row passes the MLPs that were chosen for it, and gets the weighted sum of their outputs.
//
// A table lists the choices in the order of the experts, so that every expert multiplies all of its rows at once and
// its matrices are read once. An expert that no row chose is not read. Nothing is dropped: an expert takes any number
// of rows.
//
// The blocks of all chosen experts are dealt as one series. With a barrier after each expert, a step of one row in int4
// took a sixth longer (Zen 4, 4 experts of 2048 x 768).
#pragma once

#include "../mlp_gemm/cpp_impl.cpp"

namespace labkit {

// Up to this number of choices the outputs of all of them are kept, and added up in the end. With more of them that
// would be too much memory, and experts add their outputs one after the other.
constexpr int64_t kFewChoices = 128;

// Choices by expert. A place is the number of a choice: row * choices per row + choice.
struct ExpertTable {
  int64_t* begin;   // [experts + 1]: the first of each expert's entries in `places`
  int64_t* active;  // [experts]: the experts that have entries
  int64_t* places;
  int64_t experts, active_count = 0;

  // Sorts the choices; an expert's entries are in the order of their places. Numbers that are no expert's are left out.
  ExpertTable(const int64_t* chosen, int64_t choices, int64_t experts, Scratch& memory) : experts(experts) {
    begin = memory.get<int64_t>(size_t(2 * experts + 1 + choices));
    active = begin + experts + 1;
    places = active + experts;
    std::fill(begin, begin + experts + 1, 0);
    const auto is_expert = [&](int64_t number) { return number >= 0 && number < experts; };
    for (int64_t i = 0; i < choices; ++i)
      if (is_expert(chosen[i])) ++begin[chosen[i] + 1];
    for (int64_t e = 0; e < experts; ++e) {
      if (begin[e + 1]) active[active_count++] = e;
      begin[e + 1] += begin[e];
    }
    for (int64_t i = 0; i < choices; ++i)
      if (is_expert(chosen[i])) places[begin[chosen[i]]++] = i;
    for (int64_t e = experts; e > 0; --e) begin[e] = begin[e - 1];
    begin[0] = 0;
  }

  int64_t choices() const { return begin[experts]; }
  int64_t rows(int64_t expert) const { return begin[expert + 1] - begin[expert]; }
};

// The blocks of the active experts' matrices as one series, from which this thread takes until it comes to another
// matrix.
class ExpertDeal {
 public:
  ExpertDeal(Team& team, int thread, const ExpertTable& table, int64_t blocks)
      : reading_(team.reading()), table_(table), blocks_(blocks), items_(team, table.active_count * blocks, thread) {
    item_ = items_.next();
  }

  bool done() const { return item_ < 0; }
  int64_t expert() const { return table_.active[item_ / blocks_]; }

  Reading reading() const { return reading_; }
  template <class Use>
  void operator()(int64_t, Use&& use) {
    const int64_t matrix = item_ / blocks_;
    do use(item_ % blocks_);
    while ((item_ = items_.next()) >= 0 && item_ / blocks_ == matrix);
  }

 private:
  const Reading reading_;
  const ExpertTable& table_;
  const int64_t blocks_;
  Team::Items items_;
  int64_t item_;
};

// This thread's part of out(m)[outputs] = act[m] * weight^T + bias, for the rows m of an expert, through `take`, which
// gets m, the first column, the number of columns and the sums.
template <class T, class Deal, class Take>
void expert_outputs(Deal&& deal, const Linear& out, const Activation<T>* act, int64_t act_stride, int64_t rows,
                    ThreadScratch& scratch, Take&& take) {
  gemm_part<T>(deal, out, act, act_stride, rows, scratch, [&](int64_t block, float* acc) {
    const int64_t column = block * kBlock;
    const int64_t count = out.outputs - column < kBlock ? out.outputs - column : kBlock;
    for (int64_t m = 0; m < rows; ++m) {
      float* sums = acc + m * kBlock;
      if (out.bias)
        for (int64_t i = 0; i < count; ++i) sums[i] += out.bias[column + i];
      take(m, column, count, sums);
    }
  });
}

}  // namespace labkit

// y: [rows][outputs] = the sum over the choices of share * (act * out^T + bias), with act as in region 3. h:
// [rows][hidden]. chosen, shares: [rows][per_row].
extern "C" int64_t labkit_experts(const labkit::ExpertMlps* mlps, const float* h, const int64_t* chosen,
                                  const float* shares, int64_t rows, int64_t per_row, float* y, int32_t threads) {
  using namespace labkit;
  return guarded([&]() -> int64_t {
    Team team(threads);
    const MlpWeights& first = mlps->regions[0];
    const int64_t outputs = mlps->outs[0].outputs, hidden = first.up.inputs;
    const int64_t stride = row_stride(hidden), padded = padded_depth<Weight>(hidden);
    const int64_t act_stride = row_stride(first.gated ? first.up.outputs / 2 : first.up.outputs);
    CallBuffers& buffers = call_buffers();
    const ExpertTable table(chosen, rows * per_row, mlps->count, buffers.h);
    const int64_t choices = table.choices();
    const bool few = choices <= kFewChoices;
    Act* x = buffers.x.get<Act>(choices * stride);
    Act* act = buffers.context.get<Act>(choices * act_stride);
    float* parts = buffers.wide.get<float>(few ? choices * outputs : 0);  // outputs of each entry of the table
    const auto add = [&](int64_t entry, int64_t column, int64_t count, const float* part) {
      const int64_t place = table.places[entry];
      float* to = y + place / per_row * outputs + column;
      for (int64_t i = 0; i < count; ++i) to[i] += shares[place] * part[i];
    };
    run_team(team, threads, [&](int thread) {
      ThreadScratch& scratch = thread_scratch();
      const Range gathered = team.share(choices, thread), columns = team.share(outputs, thread);
      for (int64_t i = gathered.begin; i < gathered.end; ++i)
        to_activation(h + table.places[i] / per_row * hidden, hidden, padded, x + i * stride);
      for (int64_t m = 0; m < rows; ++m)
        std::fill(y + m * outputs + columns.begin, y + m * outputs + columns.end, 0.0f);
      team.barrier();
      for (ExpertDeal deal(team, thread, table, blocks_of(first.up.outputs)); !deal.done();) {
        const int64_t e = deal.expert(), at = table.begin[e];
        mlp_part<Weight>(deal, mlps->regions[e], x + at * stride, stride, table.rows(e), act + at * act_stride,
                         act_stride, scratch);
      }
      team.barrier();
      const auto act_of = [&](int64_t expert) { return act + table.begin[expert] * act_stride; };
      if (few) {
        for (ExpertDeal deal(team, thread, table, blocks_of(outputs)); !deal.done();) {
          const int64_t e = deal.expert();
          expert_outputs<Weight>(deal, mlps->outs[e], act_of(e), act_stride, table.rows(e), scratch,
                                 [&](int64_t m, int64_t column, int64_t count, const float* sums) {
                                   std::copy(sums, sums + count, parts + (table.begin[e] + m) * outputs + column);
                                 });
        }
        team.barrier();
        for (int64_t i = 0; i < choices; ++i)
          add(i, columns.begin, columns.end - columns.begin, parts + i * outputs + columns.begin);
        return;
      }
      for (int64_t i = 0; i < table.active_count; ++i) {
        const int64_t e = table.active[i];
        expert_outputs<Weight>(TeamDeal{team, thread}, mlps->outs[e], act_of(e), act_stride, table.rows(e), scratch,
                               [&](int64_t m, int64_t column, int64_t count, const float* sums) {
                                 add(table.begin[e] + m, column, count, sums);
                               });
        team.barrier();
      }
    });
    return 0;
  });
}
