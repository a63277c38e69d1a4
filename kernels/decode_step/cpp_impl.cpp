// A step of a range of layers in one call and one parallel region: embedding, layers, LM head. The same pieces as the
// single ops; one new token per sequence (decode) or many (prompt, several tokens on a cache). Thread 0 stamps the
// clock behind every stage. A range without an embedding begins with rows that the caller gives, one without a head
// ends with rows that the caller gets: an encoder, or some of the layers of a model.
//
// This file is what gets compiled, once per weight type (LABKIT_WEIGHT); it includes the ops and the probes.
#include "../all_reduce/cpp_impl.cpp"

#include "../attention/cpp_impl.cpp"
#include "../mlp_gemm/cpp_impl.cpp"
#include "../probe.cpp"
#include "../qkv_gemm/cpp_impl.cpp"
#include "../residual_add/cpp_impl.cpp"

namespace labkit {

struct StepArgs {
  Rows rows;
  Rotary rotary;
  const Cache* caches;  // [layers]; `past` below counts, not theirs
  int64_t past;
  const int64_t* tokens;  // [rows]
  int64_t keep;           // logits of the last `keep` tokens of each sequence; 0: none
  float* logits;          // [batch * keep][vocab] or null
  int64_t* argmax;        // [batch * keep] or null; -1 where no logit is a number
  float* hidden;          // [batch * keep][hidden] after the final norm, or null
  const float* inputs;    // [rows][hidden] in place of `tokens`; or null
  float* outputs;         // [rows][hidden] after the final norm, if there is one, in place of logits; or null
  int64_t* stamps;        // one for each stage of Clock, in the order that they end, or null
  void* workspace;
  int32_t threads;
  Exchange* exchange;  // null: this process has the whole model
  int32_t own_logits;  // each rank's columns of the logits are enough for it
  int32_t reading;     // of the weights: an index into kReadings; -1: the usual one
};

// The widest row between two stages.
inline int64_t widest(const Model& model) {
  int64_t wide = model.hidden;
  if (model.embedding.size > wide) wide = model.embedding.size;
  if (model.head.matrix.weight && model.head.matrix.inputs > wide) wide = model.head.matrix.inputs;
  return wide;
}

// Shared buffers of a step, cut from one piece of memory.
struct Workspace {
  float *h, *residual, *qkv, *attn_out, *mlp_out, *normed;
  Act *x, *context, *act;
  Best* best;
  int64_t bytes;

  Workspace(const Model& model, int64_t rows, int64_t threads, char* base) {
    int64_t at = 0;
    auto cut = [&](int64_t count, int64_t size) {
      char* p = base ? base + at : nullptr;
      at += (count * size + 63) / 64 * 64;
      return p;
    };
    const Heads& heads = model.heads;
    const int64_t stride = row_stride(widest(model));
    h = reinterpret_cast<float*>(cut(rows * stride, 4));
    residual = reinterpret_cast<float*>(cut(rows * stride, 4));
    attn_out = reinterpret_cast<float*>(cut(rows * stride, 4));
    mlp_out = reinterpret_cast<float*>(cut(rows * stride, 4));
    normed = reinterpret_cast<float*>(cut(rows * stride, 4));
    x = reinterpret_cast<Act*>(cut(rows * stride, 4));
    qkv = reinterpret_cast<float*>(cut(rows * row_stride(int64_t(heads.query + 2 * heads.kv) * heads.dim), 4));
    context = reinterpret_cast<Act*>(cut(rows * row_stride(int64_t(heads.query) * heads.dim), sizeof(Act)));
    act = reinterpret_cast<Act*>(cut(rows * row_stride(model.intermediate), sizeof(Act)));
    best = reinterpret_cast<Best*>(cut(rows * threads, sizeof(Best)));
    bytes = at;
  }
};

inline Cache cache_of(const StepArgs& args, int64_t layer) {
  Cache cache = args.caches[layer];
  cache.past = args.past;
  return cache;
}

// Thread 0 writes the time behind every stage: start, embedding, those of each layer, head. A layer's are qkv,
// attention, attn_out, (all_reduce,) mlp, mlp_out, (all_reduce,) residual; with a parallel residual ranks add up once.
class Clock {
 public:
  Clock(int64_t* stamps, int thread) : next_(thread == 0 ? stamps : nullptr) {}
  void stamp() {
    if (next_) *next_++ = now_ns();
  }
  // What has been done since belongs to the last stage too.
  void again() {
    if (next_) next_[-1] = now_ns();
  }

 private:
  int64_t* next_;
};

// A token's row of the embedding table, which is the LM head where they are tied; zeros where another rank has it.
inline void look_up(const Embedding& embedding, int64_t token, float* row) {
  const int64_t width = embedding.size, n = token - embedding.begin;
  if (n < 0 || n >= embedding.rows)
    std::memset(row, 0, size_t(width) * sizeof(float));
  else if (const Stored* table = static_cast<const Stored*>(embedding.table))
    for (int64_t k = 0; k < width; ++k) row[k] = to_float(table[n * width + k]);
  else
    for (int64_t k = 0; k < width; ++k) row[k] = weight_of<Weight>(embedding.packed, n, k);
}

// h = token embedding (normed, projected) + learned position.
inline void embed(Team& team, int thread, Ranks& ranks, const Model& model, const StepArgs& args, Workspace& work,
                  int64_t stride, ThreadScratch& scratch) {
  const Embedding& embedding = model.embedding;
  const int64_t rows = int64_t(args.rows.batch) * args.rows.tokens, width = embedding.size;
  const bool project = embedding.project_in.weight;
  float* target = project ? work.residual : work.h;
  const Range mine = team.share(rows, thread);
  if (!ranks.alone()) {
    for (int64_t m = mine.begin; m < mine.end; ++m) look_up(embedding, args.tokens[m], ranks.own<float>() + m * stride);
    ranks.meet(team, thread, rows * stride * int64_t(sizeof(float)));
  }
  for (int64_t m = mine.begin; m < mine.end; ++m) {
    float* row = target + m * stride;
    if (ranks.alone())
      look_up(embedding, args.tokens[m], row);
    else
      add_parts(Parts(ranks, stride), m, 0, width, [=](int64_t i, float sum) { row[i] = sum; });
    if (embedding.norm.kind != kNoNorm) normalise(embedding.norm, row, width, row);
    if (project) to_activation(row, width, padded_depth<Weight>(width), work.x + m * stride);
  }
  if (project) {
    team.barrier();
    gemm_into<Weight>(team, thread, embedding.project_in, work.x, stride, rows, work.h, stride, scratch);
    team.barrier();
  }
  if (embedding.positions)
    for (int64_t m = mine.begin; m < mine.end; ++m) {
      const int64_t at = args.rows.positions[m] + embedding.position_offset;
      const float* position = embedding.positions + at * model.hidden;
      float* row = work.h + m * stride;
      for (int64_t i = 0; i < model.hidden; ++i) row[i] += position[i];
    }
  team.barrier();
}

inline void layer_step(Team& team, int thread, Ranks& ranks, const Model& model, const Layer& layer, const Cache& cache,
                       const StepArgs& args, Workspace& work, int64_t stride, Clock& clock, ThreadScratch& scratch) {
  const int64_t rows = int64_t(args.rows.batch) * args.rows.tokens, hidden = model.hidden;
  const int64_t qkv_stride = row_stride(layer.qkv.proj.outputs), context_stride = row_stride(layer.attn_out.inputs);
  const int64_t act_stride = row_stride(model.intermediate), bytes = rows * stride * int64_t(sizeof(float));
  const bool from_norm = model.residual_from_norm, parallel = model.parallel_residual;

  Normalised<Weight> input = normalised_rows<Weight>(team, thread, layer.qkv.norm, work.h, stride, {}, nullptr,
                                                     from_norm, rows, hidden, stride, work.x, work.residual, scratch);
  const float* residual = input.residual;
  qkv_region<Weight>(team, thread, layer.qkv, args.rotary, model.heads, args.rows, cache, input, work.qkv, qkv_stride,
                     scratch);
  clock.stamp();
  attention_region<Stored>(team, thread, layer.attention, model.heads, args.rows, cache, work.qkv, qkv_stride,
                           work.context, context_stride, scratch);
  clock.stamp();
  Linear attn_out = layer.attn_out;
  attn_out.bias = nullptr;  // joins in later
  const bool add_up = !ranks.alone() && !parallel;
  float* attended = add_up ? ranks.own<float>() : work.attn_out;
  gemm_into<Weight>(team, thread, attn_out, work.context, context_stride, rows, attended, stride, scratch);
  team.barrier();
  clock.stamp();
  Parts attention(attended, stride);
  if (add_up) {
    ranks.meet(team, thread, bytes);
    attention = Parts(ranks, stride);
    clock.stamp();
  }

  if (!parallel) {
    input = normalised_rows<Weight>(team, thread, layer.mlp.norm, residual, stride, attention, layer.attn_out.bias,
                                    from_norm, rows, hidden, stride, work.x, work.residual, scratch);
    residual = input.residual;
  } else if (layer.mlp.norm.kind != kNoNorm) {  // GPT-NeoX; GPT-J's MLP takes the rows that attention took
    input = normalised_rows<Weight>(team, thread, layer.mlp.norm, work.h, stride, {}, nullptr, false, rows, hidden,
                                    stride, work.x, work.residual, scratch);
  }
  mlp_region<Weight>(team, thread, layer.mlp, input, rows, work.act, act_stride, scratch);
  clock.stamp();
  Linear mlp_out = layer.mlp_out;
  mlp_out.bias = nullptr;  // joins in later
  if (ranks.alone()) {
    gemm_into<Weight>(team, thread, mlp_out, work.act, act_stride, rows, work.mlp_out, stride, scratch);
    team.barrier();
    clock.stamp();
    residual_share(team, thread, residual, stride, {parallel ? attention : Parts(), layer.attn_out.bias},
                   {Parts(work.mlp_out, stride), layer.mlp_out.bias}, rows, hidden, work.h, stride);
  } else {  // with a parallel residual the attention's part goes along, and both biases are mlp_out's
    gemm_into<Weight>(team, thread, mlp_out, work.act, act_stride, rows, ranks.own<float>(), stride, scratch,
                      parallel ? attended : nullptr);
    team.barrier();
    clock.stamp();
    ranks.meet(team, thread, bytes);
    clock.stamp();
    residual_share(team, thread, residual, stride, {}, {Parts(ranks, stride), layer.mlp_out.bias}, rows, hidden, work.h,
                   stride);
  }
  team.barrier();
  clock.stamp();
}

// What a rank brings to the meeting about the logits: its columns of some rows.
struct alignas(64) Columns {
  int64_t begin, count;
};

// Every rank gets the columns of the others, a few rows at a time. logits: [rows][vocab], this rank's filled in.
inline void gather_logits(Team& team, int thread, Ranks& ranks, const Model& model, int64_t rows, float* logits) {
  const int64_t vocab = model.head.vocab, most = vocab / ranks.count() + 64;
  const int64_t at_once = (ranks.room() - int64_t(sizeof(Columns))) / (most * int64_t(sizeof(float)));
  for (int64_t first = 0; first < rows; first += at_once) {
    const int64_t count = rows - first < at_once ? rows - first : at_once;
    const Range mine = team.share(count, thread);
    const Columns own{model.head.begin, model.head.matrix.outputs};
    if (thread == 0) *ranks.own<Columns>() = own;
    float* part = reinterpret_cast<float*>(ranks.own<Columns>() + 1);
    for (int64_t m = mine.begin; m < mine.end; ++m)
      std::memcpy(part + m * own.count, logits + (first + m) * vocab + own.begin, size_t(own.count) * 4);
    ranks.meet(team, thread, int64_t(sizeof(Columns)) + count * most * int64_t(sizeof(float)));
    for (int r = 0; r < ranks.count(); ++r) {
      const Columns columns = *ranks.of<Columns>(r);
      if (columns.begin == own.begin) continue;
      const float* from = reinterpret_cast<const float*>(ranks.of<Columns>(r) + 1);
      for (int64_t m = mine.begin; m < mine.end; ++m)
        std::memcpy(logits + (first + m) * vocab + columns.begin, from + m * columns.count, size_t(columns.count) * 4);
    }
  }
}

// Logits or argmax of the last `keep` tokens of each sequence.
inline void head_step(Team& team, int thread, Ranks& ranks, const Model& model, const StepArgs& args, Workspace& work,
                      int64_t stride, ThreadScratch& scratch) {
  const int64_t tokens = args.rows.tokens, kept = int64_t(args.rows.batch) * args.keep;
  const float* h = work.h;
  if (args.keep < tokens) {
    const Range mine = team.share(kept, thread);
    for (int64_t m = mine.begin; m < mine.end; ++m) {
      const int64_t row = m / args.keep * tokens + tokens - args.keep + m % args.keep;
      std::memcpy(work.mlp_out + m * stride, work.h + row * stride, size_t(model.hidden) * 4);
    }
    team.barrier();
    h = work.mlp_out;
  }
  Normalised<Weight> input = normalised_rows<Weight>(team, thread, model.final_norm, h, stride, {}, nullptr, true, kept,
                                                     model.hidden, stride, work.x, work.residual, scratch);
  if (args.hidden && thread == 0)
    for (int64_t m = 0; m < kept; ++m)
      std::memcpy(args.hidden + m * model.hidden, input.residual + m * input.residual_stride, size_t(model.hidden) * 4);
  const Head& head = model.head;
  if (head.project_out.weight) {
    gemm_into<Weight>(team, thread, head.project_out, input.x, input.stride, kept, work.normed, stride, scratch);
    team.barrier();
    const int64_t width = head.project_out.outputs;
    const Range mine = team.share(kept, thread);
    for (int64_t m = mine.begin; m < mine.end; ++m)
      to_activation(work.normed + m * stride, width, padded_depth<Weight>(width), work.x + m * stride);
    team.barrier();
    input.x = work.x;
    input.stride = stride;
  }
  if (args.logits) {
    gemm_into<Weight>(team, thread, head.matrix, input.x, input.stride, kept, args.logits + head.begin, head.vocab,
                      scratch);
    team.barrier();
    if (!ranks.alone() && !args.own_logits) gather_logits(team, thread, ranks, model, kept, args.logits);
    return;
  }
  gemm_argmax<Weight>(team, thread, head.matrix, input.x, input.stride, kept, work.best + thread * kept, scratch);
  team.barrier();
  Best* best = ranks.alone() ? work.best : ranks.own<Best>();
  if (thread == 0)
    for (int64_t m = 0; m < kept; ++m) {
      Best most = work.best[m];
      for (int t = 1; t < team.size(); ++t)
        if (const Best& other = work.best[t * kept + m]; most.loses_to(other.value, other.index)) most = other;
      if (most.index >= 0) most.index += head.begin;
      best[m] = most;
    }
  if (!ranks.alone()) ranks.meet(team, thread, kept * int64_t(sizeof(Best)));
  if (thread != 0) return;
  for (int64_t m = 0; m < kept; ++m) {
    Best most = ranks.alone() ? best[m] : ranks.of<Best>(0)[m];
    for (int r = 1; r < ranks.count(); ++r)
      if (const Best& other = ranks.of<Best>(r)[m]; most.loses_to(other.value, other.index)) most = other;
    args.argmax[m] = most.index;
  }
}

// h = the rows that the caller gives.
inline void take_inputs(Team& team, int thread, const Model& model, const StepArgs& args, Workspace& work,
                        int64_t stride) {
  const Range mine = team.share(int64_t(args.rows.batch) * args.rows.tokens, thread);
  for (int64_t m = mine.begin; m < mine.end; ++m)
    std::memcpy(work.h + m * stride, args.inputs + m * model.hidden, size_t(model.hidden) * 4);
  team.barrier();
}

// Every row, after the final norm if there is one (in an encoder the last layer's own): its time is the last stage's.
inline void give_outputs(Team& team, int thread, const Model& model, const StepArgs& args, const Workspace& work,
                         int64_t stride, Clock& clock) {
  const Range mine = team.share(int64_t(args.rows.batch) * args.rows.tokens, thread);
  for (int64_t m = mine.begin; m < mine.end; ++m)
    normalise(model.final_norm, work.h + m * stride, model.hidden, args.outputs + m * model.hidden);
  team.barrier();
  clock.again();
}

}  // namespace labkit

using namespace labkit;

extern "C" {

int64_t labkit_workspace_bytes(const Model* model, int64_t rows, int64_t threads) {
  return Workspace(*model, rows, threads, nullptr).bytes;
}

void labkit_step(const Model* model, const StepArgs* args) {
  Team team(args->threads, reading_of(args->reading));
  const int64_t rows = int64_t(args->rows.batch) * args->rows.tokens;
  Workspace work(*model, rows, args->threads, static_cast<char*>(args->workspace));
  const int64_t stride = row_stride(widest(*model));
#pragma omp parallel num_threads(args->threads)
  {
    team.join();
    const int thread = omp_get_thread_num();
    ThreadScratch& scratch = thread_scratch();
    Ranks ranks(args->exchange);
    Clock clock(args->stamps, thread);
    clock.stamp();
    if (args->inputs)
      take_inputs(team, thread, *model, *args, work, stride);
    else
      embed(team, thread, ranks, *model, *args, work, stride, scratch);
    clock.stamp();
    for (int64_t l = 0; l < model->num_layers; ++l)
      layer_step(team, thread, ranks, *model, model->layers[l], cache_of(*args, l), *args, work, stride, clock,
                 scratch);
    if (args->keep) head_step(team, thread, ranks, *model, *args, work, stride, scratch);
    if (args->outputs) give_outputs(team, thread, *model, *args, work, stride, clock);
    clock.stamp();
  }
}

}  // extern "C"
