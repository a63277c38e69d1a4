// A whole model step in one call and one parallel region: embedding, all layers, LM head. The same pieces as the single
// ops; one new token per sequence (decode) or many (prompt, several tokens on a cache). Thread 0 stamps the clock
// behind every stage.
//
// This file is what gets compiled, once per weight type (LABKIT_WEIGHT); it includes the ops and the bandwidth probe.
#include "../attention/cpp_impl.cpp"

#include "../mlp_gemm/cpp_impl.cpp"
#include "../probe.cpp"
#include "../qkv_gemm/cpp_impl.cpp"
#include "../residual_add/cpp_impl.cpp"

namespace labkit {

constexpr int kStagesPerLayer = 6;  // qkv, attention, attn_out, mlp, mlp_out, residual

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
  int64_t* stamps;        // [3 + 6 * layers] or null
  void* workspace;
  int32_t threads;
};

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
    const int64_t wide = model.embedding_size > model.hidden ? model.embedding_size : model.hidden;
    const int64_t stride = row_stride(wide);
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

// h = token embedding (normed, projected) + learned position.
inline void embed(Team& team, int thread, const Model& model, const StepArgs& args, Workspace& work, int64_t stride,
                  ThreadScratch& scratch) {
  const int64_t rows = int64_t(args.rows.batch) * args.rows.tokens, width = model.embedding_size;
  const bool project = model.project_in.weight;
  const Stored* table = static_cast<const Stored*>(model.embedding);  // null: the head's rows
  float* target = project ? work.residual : work.h;
  const Range mine = team.share(rows, thread);
  for (int64_t m = mine.begin; m < mine.end; ++m) {
    const int64_t token = args.tokens[m];
    float* row = target + m * stride;
    if (table)
      for (int64_t k = 0; k < width; ++k) row[k] = to_float(table[token * width + k]);
    else
      for (int64_t k = 0; k < width; ++k) row[k] = weight_of<Weight>(model.head, token, k);
    if (model.embedding_norm.kind != kNoNorm) normalise(model.embedding_norm, row, width, row);
    if (project) to_activation(row, width, padded_depth<Weight>(width), work.x + m * stride);
  }
  if (project) {
    team.barrier();
    gemm_into<Weight>(team, thread, model.project_in, work.x, stride, rows, work.h, stride, scratch);
    team.barrier();
  }
  if (model.positions)
    for (int64_t m = mine.begin; m < mine.end; ++m) {
      const float* position = model.positions + int64_t(args.rows.positions[m] + model.position_offset) * model.hidden;
      float* row = work.h + m * stride;
      for (int64_t i = 0; i < model.hidden; ++i) row[i] += position[i];
    }
  team.barrier();
}

inline void layer_step(Team& team, int thread, const Model& model, const Layer& layer, const Cache& cache,
                       const StepArgs& args, Workspace& work, int64_t stride, int64_t* stamps, ThreadScratch& scratch) {
  const int64_t rows = int64_t(args.rows.batch) * args.rows.tokens, hidden = model.hidden;
  const int64_t qkv_stride = row_stride(layer.qkv.proj.outputs), context_stride = row_stride(layer.attn_out.inputs);
  const int64_t act_stride = row_stride(model.intermediate);
  auto stamp = [&](int stage) {
    if (stamps && thread == 0) stamps[stage] = now_ns();
  };
  const bool from_norm = model.residual_from_norm, parallel = model.parallel_residual;

  Normalised<Weight> input = normalised_rows<Weight>(team, thread, layer.qkv.norm, work.h, stride, nullptr, 0, nullptr,
                                                     from_norm, rows, hidden, stride, work.x, work.residual, scratch);
  const float* residual = input.residual;
  qkv_region<Weight>(team, thread, layer.qkv, args.rotary, model.heads, args.rows, cache, input, work.qkv, qkv_stride,
                     scratch);
  stamp(0);
  attention_region<Stored>(team, thread, layer.attention, model.heads, args.rows, cache, work.qkv, qkv_stride,
                           work.context, context_stride, scratch);
  stamp(1);
  Linear attn_out = layer.attn_out;
  attn_out.bias = nullptr;  // joins in later
  gemm_into<Weight>(team, thread, attn_out, work.context, context_stride, rows, work.attn_out, stride, scratch);
  team.barrier();
  stamp(2);

  Addend attention{parallel ? work.attn_out : nullptr, stride, layer.attn_out.bias};
  if (!parallel) {
    input =
        normalised_rows<Weight>(team, thread, layer.mlp.norm, residual, stride, work.attn_out, stride,
                                layer.attn_out.bias, from_norm, rows, hidden, stride, work.x, work.residual, scratch);
    residual = input.residual;
  } else if (layer.mlp.norm.kind != kNoNorm) {  // GPT-NeoX; GPT-J's MLP takes the rows that attention took
    input = normalised_rows<Weight>(team, thread, layer.mlp.norm, work.h, stride, nullptr, 0, nullptr, false, rows,
                                    hidden, stride, work.x, work.residual, scratch);
  }
  mlp_region<Weight>(team, thread, layer.mlp, input, rows, work.act, act_stride, scratch);
  stamp(3);
  Linear mlp_out = layer.mlp_out;
  mlp_out.bias = nullptr;  // joins in later
  gemm_into<Weight>(team, thread, mlp_out, work.act, act_stride, rows, work.mlp_out, stride, scratch);
  team.barrier();
  stamp(4);
  residual_share(team, thread, residual, stride, attention, {work.mlp_out, stride, layer.mlp_out.bias}, rows, hidden,
                 work.h, stride);
  team.barrier();
  stamp(5);
}

// Logits or argmax of the last `keep` tokens of each sequence.
inline void head_step(Team& team, int thread, const Model& model, const StepArgs& args, Workspace& work, int64_t stride,
                      ThreadScratch& scratch) {
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
  Normalised<Weight> input = normalised_rows<Weight>(team, thread, model.final_norm, h, stride, nullptr, 0, nullptr,
                                                     true, kept, model.hidden, stride, work.x, work.residual, scratch);
  if (args.hidden && thread == 0)
    for (int64_t m = 0; m < kept; ++m)
      std::memcpy(args.hidden + m * model.hidden, input.residual + m * input.residual_stride, size_t(model.hidden) * 4);
  if (model.project_out.weight) {
    gemm_into<Weight>(team, thread, model.project_out, input.x, input.stride, kept, work.normed, stride, scratch);
    team.barrier();
    const int64_t width = model.project_out.outputs;
    const Range mine = team.share(kept, thread);
    for (int64_t m = mine.begin; m < mine.end; ++m)
      to_activation(work.normed + m * stride, width, padded_depth<Weight>(width), work.x + m * stride);
    team.barrier();
    input.x = work.x;
    input.stride = stride;
  }
  if (args.logits) {
    gemm_into<Weight>(team, thread, model.head, input.x, input.stride, kept, args.logits, model.head.outputs, scratch);
  } else {
    gemm_argmax<Weight>(team, thread, model.head, input.x, input.stride, kept, work.best + thread * kept, scratch);
  }
  team.barrier();
  if (args.logits || thread != 0) return;
  for (int64_t m = 0; m < kept; ++m) {
    Best best = work.best[m];
    for (int t = 1; t < team.size(); ++t)
      if (const Best& other = work.best[t * kept + m]; best.loses_to(other.value, other.index)) best = other;
    args.argmax[m] = best.index;
  }
}

}  // namespace labkit

using namespace labkit;

extern "C" {

int64_t labkit_workspace_bytes(const Model* model, int64_t rows, int64_t threads) {
  return Workspace(*model, rows, threads, nullptr).bytes;
}

void labkit_step(const Model* model, const StepArgs* args) {
  Team team(args->threads);
  const int64_t rows = int64_t(args->rows.batch) * args->rows.tokens;
  Workspace work(*model, rows, args->threads, static_cast<char*>(args->workspace));
  const int64_t stride = row_stride(model->embedding_size > model->hidden ? model->embedding_size : model->hidden);
  if (args->stamps) args->stamps[0] = now_ns();
#pragma omp parallel num_threads(args->threads)
  {
    team.join();
    const int thread = omp_get_thread_num();
    ThreadScratch& scratch = thread_scratch();
    embed(team, thread, *model, *args, work, stride, scratch);
    if (args->stamps && thread == 0) args->stamps[1] = now_ns();
    for (int64_t l = 0; l < model->num_layers; ++l)
      layer_step(team, thread, *model, model->layers[l], cache_of(*args, l), *args, work, stride,
                 args->stamps ? args->stamps + 2 + l * kStagesPerLayer : nullptr, scratch);
    if (args->keep) head_step(team, thread, *model, *args, work, stride, scratch);
    if (args->stamps && thread == 0) args->stamps[2 + model->num_layers * kStagesPerLayer] = now_ns();
  }
}

}  // extern "C"
