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

// Choices by expert. A place is the number of a choice: row * choices per row + choice. The arrays lie in memory that
// all threads share.
struct ExpertTable {
  int64_t experts;
  int64_t* begin;         // [experts + 1]: the first of each expert's entries in `places`
  int64_t* active;        // [experts]: the experts that have entries
  int64_t* active_count;  // their number
  int64_t* places;        // [choices]

  static int64_t numbers(int64_t experts, int64_t choices) { return 2 * experts + 2 + choices; }
  ExpertTable(int64_t experts, int64_t* memory)
      : experts(experts),
        begin(memory),
        active(begin + experts + 1),
        active_count(active + experts),
        places(active_count + 1) {}

  // Sorts the choices; an expert's entries are in the order of their places. The experts here have the numbers from
  // `first` on, and all other numbers are left out. One thread calls it, and a barrier follows.
  void fill(const int64_t* chosen, int64_t choices, int64_t first) {
    std::fill(begin, begin + experts + 1, 0);
    const auto is_expert = [&](int64_t number) { return number >= first && number < first + experts; };
    for (int64_t i = 0; i < choices; ++i)
      if (is_expert(chosen[i])) ++begin[chosen[i] - first + 1];
    *active_count = 0;
    for (int64_t e = 0; e < experts; ++e) {
      if (begin[e + 1]) active[(*active_count)++] = e;
      begin[e + 1] += begin[e];
    }
    for (int64_t i = 0; i < choices; ++i)
      if (is_expert(chosen[i])) places[begin[chosen[i] - first]++] = i;
    for (int64_t e = experts; e > 0; --e) begin[e] = begin[e - 1];
    begin[0] = 0;
  }

  int64_t choices() const { return begin[experts]; }
  int64_t rows(int64_t expert) const { return begin[expert + 1] - begin[expert]; }
};

// All active experts of a table as one wave: their matrices are in memory.
struct OneWave {
  const ExpertMlps& mlps;
  bool given = false;

  // The active experts [begin, end) that follow; none: all were given.
  Range next(const ExpertTable& table) {
    const Range wave{0, given ? 0 : *table.active_count};
    given = true;
    return wave;
  }
};

// The blocks of the matrices of a wave's experts as one series, from which this thread takes until it comes to another
// matrix.
class ExpertDeal {
 public:
  ExpertDeal(Team& team, int thread, const int64_t* experts, int64_t count, int64_t blocks)
      : reading_(team.reading()), experts_(experts), blocks_(blocks), items_(team, count * blocks, thread) {
    item_ = items_.next();
  }

  bool done() const { return item_ < 0; }
  int64_t expert() const { return experts_[item_ / blocks_]; }

  Reading reading() const { return reading_; }
  template <class Use>
  void operator()(int64_t, Use&& use) {
    const int64_t matrix = item_ / blocks_;
    do use(item_ % blocks_);
    while ((item_ = items_.next()) >= 0 && item_ / blocks_ == matrix);
  }

 private:
  const Reading reading_;
  const int64_t* const experts_;
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

// Working memory of a mixture for at most `choices` choices, cut by `cut(numbers, bytes of each)`.
struct ExpertMemory {
  int64_t* table;
  int64_t stride, act_stride;
  Act *x, *act;  // [choices][stride], [choices][act_stride]
  float* parts;  // outputs of each entry of the table, if these are few

  template <class Cut>
  ExpertMemory(const ExpertMlps& mlps, int64_t choices, Cut&& cut) {
    const MlpWeights& first = mlps.regions[0];
    stride = row_stride(first.up.inputs);
    act_stride = row_stride(first.gated ? first.up.outputs / 2 : first.up.outputs);
    table = reinterpret_cast<int64_t*>(cut(ExpertTable::numbers(mlps.count, choices), 8));
    x = reinterpret_cast<Act*>(cut(choices * stride, sizeof(Act)));
    act = reinterpret_cast<Act*>(cut(choices * act_stride, sizeof(Act)));
    parts = reinterpret_cast<float*>(cut(std::min(choices, kFewChoices) * mlps.outs[0].outputs, 4));
  }
};

// y: [rows][y_stride] = the sum over the choices of share * (act * out^T + bias), with act as in region 3. shares:
// [rows][per_row], by place. `gather(row, x)` writes the activations of a row. `waves` gives the experts as they are in
// memory; with more than kFewChoices choices in the order of the table. On all threads, once one of them has filled the
// table. Ends before a barrier.
template <class Waves, class Gather>
void experts_region(Team& team, int thread, Waves&& waves, const float* shares, int64_t rows, int64_t per_row,
                    const ExpertMemory& memory, Gather&& gather, float* y, int64_t y_stride, ThreadScratch& scratch) {
  const ExpertMlps& mlps = waves.mlps;
  const ExpertTable table(mlps.count, memory.table);
  const int64_t ups = mlps.regions[0].up.outputs, outputs = mlps.outs[0].outputs, choices = table.choices();
  const bool few = choices <= kFewChoices;
  const Range gathered = team.share(choices, thread), columns = team.share(outputs, thread);
  const auto add = [&](int64_t entry, int64_t column, int64_t count, const float* part) {
    const int64_t place = table.places[entry];
    float* to = y + place / per_row * y_stride + column;
    for (int64_t i = 0; i < count; ++i) to[i] += shares[place] * part[i];
  };
  const auto act_of = [&](int64_t expert) { return memory.act + table.begin[expert] * memory.act_stride; };
  for (int64_t i = gathered.begin; i < gathered.end; ++i)
    gather(table.places[i] / per_row, memory.x + i * memory.stride);
  for (int64_t m = 0; m < rows; ++m) std::fill(y + m * y_stride + columns.begin, y + m * y_stride + columns.end, 0.0f);
  team.barrier();
  for (Range wave = waves.next(table); wave.begin < wave.end; wave = waves.next(table)) {
    const int64_t* const experts = table.active + wave.begin;
    const int64_t count = wave.end - wave.begin;
    for (ExpertDeal deal(team, thread, experts, count, blocks_of(ups)); !deal.done();) {
      const int64_t e = deal.expert();
      mlp_part<Weight>(deal, mlps.regions[e], memory.x + table.begin[e] * memory.stride, memory.stride, table.rows(e),
                       act_of(e), memory.act_stride, scratch);
    }
    team.barrier();
    if (few) {
      for (ExpertDeal deal(team, thread, experts, count, blocks_of(outputs)); !deal.done();) {
        const int64_t e = deal.expert();
        expert_outputs<Weight>(deal, mlps.outs[e], act_of(e), memory.act_stride, table.rows(e), scratch,
                               [&](int64_t m, int64_t column, int64_t count, const float* sums) {
                                 std::copy(sums, sums + count, memory.parts + (table.begin[e] + m) * outputs + column);
                               });
      }
      team.barrier();
      continue;
    }
    for (int64_t i = 0; i < count; ++i) {
      const int64_t e = experts[i];
      expert_outputs<Weight>(TeamDeal{team, thread}, mlps.outs[e], act_of(e), memory.act_stride, table.rows(e), scratch,
                             [&](int64_t m, int64_t column, int64_t count, const float* sums) {
                               add(table.begin[e] + m, column, count, sums);
                             });
      team.barrier();
    }
  }
  for (int64_t i = 0; few && i < choices; ++i)
    add(i, columns.begin, columns.end - columns.begin, memory.parts + i * outputs + columns.begin);
}

}  // namespace labkit

// As `experts_region`, of rows h: [rows][hidden]. chosen: [rows][per_row]. y: [rows][outputs].
extern "C" int64_t labkit_experts(const labkit::ExpertMlps* mlps, const float* h, const int64_t* chosen,
                                  const float* shares, int64_t rows, int64_t per_row, float* y, int32_t threads) {
  using namespace labkit;
  return guarded([&]() -> int64_t {
    Team team(threads);
    const int64_t hidden = mlps->regions[0].up.inputs, padded = padded_depth<Weight>(hidden);
    CallBuffers& buffers = call_buffers();
    Scratch* const parts[] = {&buffers.h, &buffers.x, &buffers.context, &buffers.wide};
    int part = 0;
    const ExpertMemory memory(*mlps, rows * per_row, [&](int64_t numbers, int64_t size) {
      return parts[part++]->get<char>(size_t(numbers * size));
    });
    ExpertTable(mlps->count, memory.table).fill(chosen, rows * per_row, 0);
    run_team(team, threads, [&](int thread) {
      experts_region(
          team, thread, OneWave{*mlps}, shares, rows, per_row, memory,
          [&](int64_t row, Act* x) { to_activation(h + row * hidden, hidden, padded, x); }, y, mlps->outs[0].outputs,
          thread_scratch());
    });
    return 0;
  });
}
