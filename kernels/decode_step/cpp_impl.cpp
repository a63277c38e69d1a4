// A step of a range of layers in one call and one parallel region: embedding, layers, LM head. It runs the code of the
// single ops, for one new token per sequence (decode) or many (prompt, several tokens on a cache). Thread 0 takes the
// time of every stage. A range without an embedding begins with the caller's rows, and a range without a head returns
// rows: an encoder, or some of the layers of a model.
//
// The tokens of a long prompt come in chunks. A layer takes all chunks, one after the other, before the next layer. So
// layers that are read from a file are read once for a prompt of any length.
//
// This file is compiled once per weight type (LABKIT_WEIGHT). It includes the ops and the probes.
#include "../all_reduce/cpp_impl.cpp"

#include "../attention/cpp_impl.cpp"
#include "../cache_stream/cpp_impl.cpp"
#include "../expert_store/cpp_impl.cpp"
#include "../experts/cpp_impl.cpp"
#include "../layer_stream/cpp_impl.cpp"
#include "../linear_attention/cpp_impl.cpp"
#include "../mailbox/cpp_impl.cpp"
#include "../mlp_gemm/cpp_impl.cpp"
#include "../norm_rows/cpp_impl.cpp"
#include "../packing.cpp"
#include "../probe.cpp"
#include "../qkv_gemm/cpp_impl.cpp"
#include "../quantise.cpp"
#include "../residual_add/cpp_impl.cpp"
#include "../route/cpp_impl.cpp"
#include "../slot_copies/cpp_impl.cpp"
#include "ends.h"
#include "mixture.h"

namespace labkit {

inline void layer_step(Team& team, int thread, Ranks& ranks, const Model& model, const Layer& layer, const Cache& cache,
                       const Rotary& rotary, const Chunk& chunk, Workspace& work, int64_t stride, const StoredLayer& at,
                       Clock& clock, ThreadScratch& scratch) {
  const int64_t rows = chunk.count(), hidden = model.hidden;
  const int64_t qkv_stride = row_stride(layer.qkv.proj.outputs), context_stride = row_stride(layer.attn_out.inputs);
  const int64_t act_stride = row_stride(model.intermediate), bytes = rows * stride * int64_t(sizeof(float));
  const DenseMlp& mlp = layer.mlp;
  const bool from_norm = model.residual_from_norm, parallel = model.parallel_residual;

  if (at.store) guess_experts(team, thread, at, layer, work.h, stride, rows, hidden, work, scratch);
  Normalised<Weight> input = normalised_rows<Weight>(team, thread, layer.qkv.norm, work.h, stride, {}, from_norm, rows,
                                                     hidden, stride, work.x, work.residual, scratch);
  const float* residual = input.residual;
  qkv_region<Weight>(team, thread, layer.qkv, rotary, model.heads, chunk.rows, cache, input, work.qkv, qkv_stride,
                     scratch);
  clock.stamp(LayerStage::kQkv);
  attention_region<Stored>(
      team, thread,
      {layer.attention, model.heads, chunk.rows, cache, work.qkv, qkv_stride, work.context, context_stride},
      work.attention, scratch);
  clock.stamp(LayerStage::kAttention);
  Linear attn_out = layer.attn_out;
  attn_out.bias = nullptr;  // added later
  const bool add_up = !ranks.alone() && !parallel;
  float* attended = add_up ? ranks.own<float>() : work.attn_out;
  gemm_into<Weight>(team, thread, attn_out, work.context, context_stride, rows, attended, stride, scratch);
  team.barrier();
  clock.stamp(LayerStage::kAttnOut);
  Parts attention(attended, stride);
  if (add_up) {
    ranks.meet(team, thread, bytes);
    attention = Parts(ranks, stride);
    clock.stamp(LayerStage::kAllReduce);
  }

  if (!parallel) {
    input = normalised_rows<Weight>(team, thread, mlp.region.norm, residual, stride,
                                    {attention, layer.attn_out.bias, mlp.region.addend_norm}, from_norm, rows, hidden,
                                    stride, work.x, work.residual, scratch);
    residual = input.residual;
  } else if (mlp.region.norm.kind != kNoNorm) {  // GPT-NeoX; GPT-J's MLP takes the same rows as its attention
    input = normalised_rows<Weight>(team, thread, mlp.region.norm, work.h, stride, {}, false, rows, hidden, stride,
                                    work.x, work.residual, scratch);
  }
  float* const out = ranks.alone() ? work.mlp_out : ranks.own<float>();
  if (layer.mixture) {
    mixture_step(team, thread, layer, input, rows, hidden, work, act_stride, out, stride, at, clock, scratch);
  } else {
    mlp_region<Weight>(team, thread, mlp.region, input, rows, work.act, act_stride, scratch);
    clock.stamp(LayerStage::kMlp);
    Linear mlp_out = mlp.out;
    mlp_out.bias = nullptr;  // added later
    // With a parallel residual the attention's part goes into the sum of the ranks, too.
    gemm_into<Weight>(team, thread, mlp_out, work.act, act_stride, rows, out, stride, scratch,
                      parallel && !ranks.alone() ? attended : nullptr);
    team.barrier();
    clock.stamp(LayerStage::kMlpOut);
  }
  if (ranks.alone()) {
    residual_share(team, thread, residual, stride, {parallel ? attention : Parts(), layer.attn_out.bias},
                   {Parts(work.mlp_out, stride), mlp.out.bias, mlp.out_norm}, rows, hidden, work.h, stride);
  } else {  // with a parallel residual the bias of mlp_out is the sum of both biases
    ranks.meet(team, thread, bytes);
    clock.stamp(LayerStage::kAllReduce);
    residual_share(team, thread, residual, stride, {}, {Parts(ranks, stride), mlp.out.bias, mlp.out_norm}, rows, hidden,
                   work.h, stride);
  }
  team.barrier();
  clock.stamp(LayerStage::kResidual);
}

// A streamed layer with its matrices in its slot. experts: memory for the moved experts of a mixture.
inline Layer shifted(Layer layer, const char* from, const char* to, MovedMixture& experts) {
  const auto move = [&](Linear& linear) {
    for (const void** at : {&linear.weight, &linear.scales})
      if (*at) *at = to + (static_cast<const char*>(*at) - from);
  };
  for (Linear* linear : {&layer.qkv.proj, &layer.attn_out, &layer.mlp.region.up, &layer.mlp.out}) move(*linear);
  if (layer.mixture) layer.mixture = experts.moved(*layer.mixture, move);
  return layer;
}

// Waits until the slot of a layer's turn is filled, and returns the slot.
inline char* awaited(SlotStream& stream, int64_t turn, int64_t layer, int thread) {
  const int64_t wanted = thread == 0 ? now_ns() : 0;
  char* const slot = stream.wait(turn);
  if (thread == 0) stream.note(kWait, layer, wanted, now_ns());
  return slot;
}

// All layers, each on all chunks. first_turn: turn of the stream's first block.
inline void layer_steps(Team& team, int thread, Ranks& ranks, const Model& model, const StepArgs& args, Workspace work,
                        int64_t stride, int64_t first_turn, Clock& clock, ThreadScratch& scratch) {
  float* const first_h = work.h;
  const Chunk& last = args.chunks[args.num_chunks - 1];
  const Range written{args.chunks[0].past, last.past + last.rows.tokens};
  MovedMixture experts;
  int64_t mixtures = 0;  // before the layer
  for (int64_t l = 0; l < model.num_layers; ++l) {
    const int64_t block = args.stream ? args.blocks[l] : -1;
    clock.begin_layer(l);
    Layer layer = model.layers[l];
    char* kv_slot = nullptr;
    if (block >= 0)
      layer = shifted(layer, args.first_slot, awaited(*args.stream, first_turn + block, l, thread), experts);
    if (args.stream) clock.stamp(LayerStage::kFetch);
    if (args.kv_stream) {
      kv_slot = awaited(*args.kv_stream, args.kv_turn + l, l, thread);
      clock.stamp(LayerStage::kFetchKv);
    }
    const int64_t begin = (args.stream || args.kv_stream) && thread == 0 ? now_ns() : 0;
    const StoredLayer at{layer.mixture ? args.experts : nullptr, mixtures};
    work.h = first_h;
    if (layer.mixture) {
      if (args.experts_read) work.mixture->experts_read = args.experts_read + l;
      if (args.chosen) work.mixture->noted = args.chosen + mixtures * args.rows() * layer.mixture->router.chosen;
      ++mixtures;
    }
    for (int64_t c = 0; c < args.num_chunks; ++c) {
      const Chunk& chunk = args.chunks[c];
      layer_step(team, thread, ranks, model, layer, cache_of(args, model.heads, chunk, l, kv_slot), args.rotary, chunk,
                 work, stride, at, clock, scratch);
      work.h += chunk.count() * stride;
      if (args.chosen && layer.mixture) work.mixture->noted += chunk.count() * layer.mixture->router.chosen;
    }
    if (thread != 0) continue;
    const int64_t end = args.stream || args.kv_stream ? now_ns() : 0;  // before slots are released and refilled
    if (block >= 0) args.stream->release(first_turn + block);
    if (args.kv_stream) args.kv_stream->release(args.kv_turn + l, written);
    for (SlotStream* stream : {args.stream, args.kv_stream})
      if (stream) stream->note(kCompute, l, begin, end);
  }
}

// Whether any rank of the model could not read its layers, or its keys and values. All ranks have to know, because they
// go on together.
inline bool any_failed(Team& team, int thread, Ranks& ranks, const StepArgs& args) {
  const bool mine = (args.stream && args.stream->pass_failed()) || (args.kv_stream && args.kv_stream->pass_failed()) ||
                    (args.experts && args.experts->failed());
  if (ranks.alone()) return mine;
  if (thread == 0) *ranks.own<int32_t>() = mine;
  ranks.meet(team, thread, sizeof(int32_t));
  bool failed = false;
  for (int r = 0; r < ranks.count(); ++r) failed |= *ranks.of<int32_t>(r) != 0;
  return failed;
}

}  // namespace labkit

using namespace labkit;

extern "C" {

int64_t labkit_workspace_bytes(const Model* model, int64_t all_rows, int64_t rows, int64_t threads) {
  return Workspace(*model, all_rows, rows, threads, nullptr).bytes;
}

// Returns whether a stream of any rank has failed. The results are then invalid.
static int64_t run_step(const Model* model, const StepArgs* args) {
  Team team(args->threads, reading_of(args->reading));
  int64_t all_rows = 0, rows = 0, shared = 0;
  for (int64_t c = 0; c < args->num_chunks; ++c) {
    const int64_t count = args->chunks[c].count();
    all_rows += count;
    if (count > rows) rows = count;
    const Chunk& chunk = args->chunks[c];
    shared = std::max(shared, attention_bytes(model->heads, chunk.rows, chunk.past + chunk.rows.tokens));
  }
  Workspace whole(*model, all_rows, rows, args->threads, static_cast<char*>(args->workspace));
  whole.attention = call_buffers().attention.get<char>(size_t(shared));
  const int64_t stride = row_stride(widest(*model));
  const int64_t first_turn = args->stream ? args->stream->begin_pass() : 0;
  PlacedExperts placed;
  if (args->experts) args->experts->begin_pass();
  whole.placed = &placed;
  bool failed = false;
  run_team(team, args->threads, [&](int thread) {
    ThreadScratch& scratch = thread_scratch();
    Ranks ranks(args->exchange);
    Clock clock(args->times, model->num_layers, thread);
    Workspace work = whole;
    for (int64_t c = 0; c < args->num_chunks; ++c) {
      const Chunk& chunk = args->chunks[c];
      if (chunk.inputs)
        take_inputs(team, thread, *model, chunk, work, stride);
      else
        embed(team, thread, ranks, *model, chunk, work, stride, scratch);
      clock.stamp_embedding();
      work.h += chunk.count() * stride;
    }
    layer_steps(team, thread, ranks, *model, *args, whole, stride, first_turn, clock, scratch);
    work.h = whole.h;
    for (int64_t c = 0; c < args->num_chunks; ++c) {
      const Chunk& chunk = args->chunks[c];
      if (c > 0) team.barrier();  // thread 0 may still search the largest logits of the previous chunk
      if (chunk.keep) head_step(team, thread, ranks, *model, chunk, args->own_logits, work, stride, scratch);
      if (chunk.outputs) give_outputs(team, thread, *model, chunk, work, stride, clock);
      clock.stamp_head();
      work.h += chunk.count() * stride;
    }
    if ((args->stream || args->kv_stream || args->experts) && any_failed(team, thread, ranks, *args) && thread == 0)
      failed = true;
  });
  return failed;
}

int64_t labkit_step(const Model* model, const StepArgs* args) {
  return guarded([=] { return run_step(model, args); });
}

// Chooses the tokens of step `done`. False: torch's rounding would decide.
static bool choose_ahead(const Model& model, const StepArgs& args, const Chunk& chunk, const ChoiceAhead& choice,
                         int64_t done, int64_t* chosen) {
  const int64_t begin = now_ns(), batch = chunk.rows.batch, first_rule = choice.rules_before[done];
  std::fill(chosen, chosen + batch, -1);
  const ChoiceCall call{chunk.logits,
                        batch,
                        model.head.vocab,
                        choice.text,
                        choice.length + done,
                        choice.text_stride,
                        choice.rules + first_rule,
                        choice.rules_before[done + 1] - first_rule,
                        nullptr};
  const bool sure = choose(call, choice.state, chosen, args.threads) == 0;
  if (args.times) *Clock::sample(args.times, model.num_layers) += now_ns() - begin;
  return sure;
}

// Returns the number of steps. The tokens of the last one are negative if they were not chosen.
static int64_t run_ahead(const Model* model, const StepArgs* args, const AheadArgs* ahead) {
  Chunk chunk = args->chunks[0];
  StepArgs step = *args;
  step.chunks = &chunk;
  const int64_t batch = chunk.rows.batch;
  std::vector<int64_t> tokens(chunk.tokens, chunk.tokens + batch);
  std::vector<int32_t> positions(chunk.rows.positions, chunk.rows.positions + batch);
  chunk.tokens = tokens.data();
  chunk.rows.positions = positions.data();
  const ChoiceAhead* choice = ahead->choice;
  bool goes_on = true;
  int64_t done = 0;
  while (goes_on && done < ahead->most) {
    int64_t* const chosen = ahead->chosen + done * batch;
    if (!choice) chunk.argmax = chosen;
    run_step(model, &step);
    if (choice && !choose_ahead(*model, step, chunk, *choice, done, chosen)) return done + 1;
    bool all_ended = true, stops = false;
    for (int64_t b = 0; b < batch; ++b) {
      int64_t& token = chosen[b];
      uint8_t& ended = ahead->ended[b];
      if (ended && ahead->pad >= 0) token = ahead->pad;
      if (!ended) {
        const uint8_t mark = token < 0 ? 2 : ahead->marks[token];
        ended = mark == 1;
        stops |= mark == 2;
      }
      all_ended &= ended != 0;
      tokens[size_t(b)] = token;
      if (choice) choice->text[b * choice->text_stride + choice->length + done] = token;
      ++positions[size_t(b)];
    }
    const bool all_chosen = *std::min_element(tokens.begin(), tokens.end()) >= 0;
    stops |= !all_chosen;
    if (ahead->after_step && all_chosen) {
      const int64_t begin = now_ns();
      stops |= ahead->after_step(done) == 0;
      if (step.times) *Clock::sample(step.times, model->num_layers) += now_ns() - begin;
    }
    ++chunk.past;
    ++done;
    goes_on = !all_ended && !stops;
  }
  return done;
}

int64_t labkit_steps_ahead(const Model* model, const StepArgs* args, const AheadArgs* ahead) {
  return guarded([=] { return run_ahead(model, args, ahead); });
}

}  // extern "C"

#if defined(LABKIT_LAYOUTS)
LABKIT_LAYOUTS  // compares the structs with their mirrors in Python (build.layouts)
#endif
