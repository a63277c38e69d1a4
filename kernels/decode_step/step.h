// The arguments of a step, its working memory, and the clock of its stages.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "../all_reduce/exchange.h"
#include "../choice/cpp_impl.cpp"
#include "../expert_store/store.h"
#include "../experts/cpp_impl.cpp"
#include "../gemm/cpp_impl.cpp"
#include "../route/cpp_impl.cpp"
#include "../slot_stream/slot_stream.h"

namespace labkit {

// Tokens that go through a layer together.
struct Chunk {
  Rows rows;
  int64_t past;            // tokens before them in every sequence's cache; the caches' own `past` is not used
  const int64_t* tokens;   // [rows]
  int64_t keep;            // logits of the last `keep` tokens of each sequence; 0: none
  float* logits;           // [batch * keep][vocab] or null
  int64_t* argmax;         // [batch * keep] or null; -1 where all logits are NaN
  float* hidden;           // [batch * keep][hidden] after the final norm, or null
  const float* inputs;     // [rows][hidden] instead of `tokens`, or null
  float* outputs;          // [rows][hidden] after the final norm if any, instead of logits, or null
  int64_t first_sequence;  // the chunk's first sequence in the caches; its others follow

  int64_t count() const { return int64_t(rows.batch) * rows.tokens; }
};

struct StepArgs {
  const Chunk* chunks;
  int64_t num_chunks;
  Rotary rotary;
  const Cache* caches;  // [layers]
  int64_t* times;       // nanoseconds per stage of Clock, to which the step adds; or null
  void* workspace;
  int32_t threads;
  Exchange* exchange;      // null: this process has the whole model
  int32_t own_logits;      // whether a rank needs only its own columns of the logits
  int32_t reading;         // of the weights: an index into kReadings; -1: the usual one
  SlotStream* stream;      // of streamed layers; null: all layers are resident
  const int64_t* blocks;   // [layers] with a stream: the layer's block; -1: the layer is resident
  const char* first_slot;  // the weights of the streamed layers point into it
  SlotStream* kv_stream;   // of keys and values; null: they are resident
  int64_t kv_turn;         // of the first layer's keys and values, in a pass that has begun
  const char* kv_slot;     // the first slot; the caches point into it
  int64_t* experts_read;   // [layers]: number of experts that were read, to which the step adds; or null
  int64_t* chosen;         // [mixtures][rows of all chunks][chosen]: the experts of each row; or null
  ExpertStore* experts;    // null: the experts are resident, or in the slots of `stream`

  int64_t rows() const {
    int64_t rows = 0;
    for (int64_t c = 0; c < num_chunks; ++c) rows += chunks[c].count();
    return rows;
  }
};

// Choice of the tokens of several steps from the logits of their chunk.
struct ChoiceAhead {
  int64_t* text;  // [batch][text_stride], the tokens before the steps, and room for theirs
  int64_t length, text_stride;
  const ScoreRule* rules;       // of all steps, one after the other
  const int64_t* rules_before;  // [most + 1]: number of rules of earlier steps
  TwisterState* state;          // torch's generator, which the draws advance; null: the largest score is chosen
};

// Steps of the one chunk of a step, with one token of each sequence.
struct AheadArgs {
  int64_t most;               // steps
  const uint8_t* marks;       // [vocab]: 1 ends the token's sequence; after 2 no step follows
  uint8_t* ended;             // [batch]: sequences that have ended; once all have, no step follows
  int64_t* chosen;            // [most][batch]
  int64_t pad;                // token of sequences that have ended; -1: they go on
  const ChoiceAhead* choice;  // null: the argmax
  // Called after each step that chose all its tokens; once it returns 0, no step follows. null: not called.
  int64_t (*after_step)(int64_t step);
};

// The widest row between two stages.
inline int64_t widest(const Model& model) {
  int64_t wide = model.hidden;
  if (model.embedding.size > wide) wide = model.embedding.size;
  if (model.head.matrix.weight && model.head.matrix.inputs > wide) wide = model.head.matrix.inputs;
  return wide;
}

// Working memory of the mixtures of a model, for the rows of a chunk.
struct MixtureMemory {
  float* logits;     // [rows][experts of all ranks]
  int64_t* chosen;   // [rows][chosen]
  float* shares;     // [rows][chosen]
  float* gates;      // [rows], of the shared expert
  int64_t* guessed;  // [rows][chosen]: experts that rows will probably choose
  ExpertMemory experts;
  int64_t* experts_read = nullptr;  // of the layer: see StepArgs
  int64_t* noted = nullptr;         // where the choices of the layer's next rows are noted

  template <class Cut>
  MixtureMemory(const Mixture& mixture, int64_t rows, Cut&& cut)
      : logits(reinterpret_cast<float*>(cut(rows * mixture.router.matrix.outputs, 4))),
        chosen(reinterpret_cast<int64_t*>(cut(rows * mixture.router.chosen, 8))),
        shares(reinterpret_cast<float*>(cut(rows * mixture.router.chosen, 4))),
        gates(reinterpret_cast<float*>(cut(rows, 4))),
        guessed(reinterpret_cast<int64_t*>(cut(rows * mixture.router.chosen, 8))),
        experts(mixture.experts, rows * mixture.router.chosen, cut) {}
};

// The experts of a layer in a store. One thread writes it, and a barrier follows.
struct PlacedExperts {
  std::vector<MlpWeights> regions;  // [experts]
  std::vector<Linear> outs;
  int64_t wave = 0;  // the number of experts in the present wave, whose matrices are in place

  // The experts of the next layer, whose matrices are not in place yet.
  void begin(const ExpertMlps& experts) {
    regions.assign(experts.regions, experts.regions + experts.count);
    outs.assign(experts.outs, experts.outs + experts.count);
  }
  ExpertMlps mlps() const { return {regions.data(), outs.data(), int64_t(regions.size())}; }
};

// Shared buffers of a step, cut from one piece of memory.
struct Workspace {
  float *h, *residual, *qkv, *attn_out, *mlp_out, *normed;
  Act *x, *context, *act;
  Best* best;
  std::optional<MixtureMemory> mixture;  // all mixtures have the same sizes; nullopt: no layer has one
  char* attention = nullptr;             // attention_bytes(), which depend on the cache, so the caller adds them
  PlacedExperts* placed = nullptr;       // of a step with a store, which the caller adds
  int64_t bytes;

  // all_rows: rows of all chunks, whose `h` are consecutive; rows: rows of the largest chunk.
  Workspace(const Model& model, int64_t all_rows, int64_t rows, int64_t threads, char* base) {
    int64_t at = 0;
    auto cut = [&](int64_t count, int64_t size) {
      char* p = base ? base + at : nullptr;
      at += round_up(count * size, kLine);
      return p;
    };
    const Heads& heads = model.heads;
    const int64_t stride = row_stride(widest(model));
    h = reinterpret_cast<float*>(cut(all_rows * stride, 4));
    residual = reinterpret_cast<float*>(cut(rows * stride, 4));
    attn_out = reinterpret_cast<float*>(cut(rows * stride, 4));
    mlp_out = reinterpret_cast<float*>(cut(rows * stride, 4));
    normed = reinterpret_cast<float*>(cut(rows * stride, 4));
    x = reinterpret_cast<Act*>(cut(rows * stride, 4));
    qkv = reinterpret_cast<float*>(cut(rows * row_stride(int64_t(heads.query + 2 * heads.kv) * heads.dim), 4));
    context = reinterpret_cast<Act*>(cut(rows * row_stride(int64_t(heads.query) * heads.dim), sizeof(Act)));
    act = reinterpret_cast<Act*>(cut(rows * row_stride(model.intermediate), sizeof(Act)));
    best = reinterpret_cast<Best*>(cut(rows * threads, sizeof(Best)));
    const Layer* const end = model.layers + model.num_layers;
    const Layer* const first = std::find_if(model.layers, end, [](const Layer& layer) { return layer.mixture; });
    if (first != end) mixture.emplace(*first->mixture, rows, cut);
    bytes = at;
  }
};

// A layer's cache, from the chunk's first sequence on. slot: that of the keys and values; null: they are resident.
inline Cache cache_of(const StepArgs& args, const Heads& heads, const Chunk& chunk, int64_t layer, char* slot) {
  Cache cache = args.caches[layer];
  cache.past = chunk.past;
  const int64_t before = chunk.first_sequence * heads.kv * cache.capacity;
  const int64_t bytes = before * heads.padded_dim * (cache.key_scales ? 1 : int64_t(sizeof(Stored)));
  cache.keys = static_cast<char*>(cache.keys) + bytes;
  cache.values = static_cast<char*>(cache.values) + bytes;
  for (bf16** scales : {&cache.key_scales, &cache.value_scales})
    if (*scales) *scales += before;
  if (!slot) return cache;
  cache.keys = slot + (static_cast<char*>(cache.keys) - args.kv_slot);
  cache.values = slot + (static_cast<char*>(cache.values) - args.kv_slot);
  for (bf16** scales : {&cache.key_scales, &cache.value_scales})
    if (*scales) *scales = reinterpret_cast<bf16*>(slot + (reinterpret_cast<char*>(*scales) - args.kv_slot));
  return cache;
}

// The stages of a layer. Python has them in the same order (LAYER_STAGES of weights.py).
enum class LayerStage : int64_t {
  kFetch,
  kFetchKv,
  kQkv,
  kAttention,
  kAttnOut,
  kAllReduce,
  kRoute,
  kExperts,
  kMlp,
  kMlpOut,
  kResidual
};
constexpr int64_t kLayerStages = int64_t(LayerStage::kResidual) + 1;

// Thread 0 adds up the time of every stage: of the embedding, of the stages of each layer, of the head, and of the
// choice of tokens. A stamp ends a stage and begins the next one.
class Clock {
 public:
  // The place of the choice of tokens in `times`.
  static int64_t* sample(int64_t* times, int64_t layers) { return times + 2 + layers * kLayerStages; }

  Clock(int64_t* times, int64_t layers, int thread)
      : times_(thread == 0 ? times : nullptr), layers_(layers), last_(times_ ? now_ns() : 0) {}

  void begin_layer(int64_t layer) { layer_ = layer; }
  void stamp(LayerStage stage) { add_to(1 + layer_ * kLayerStages + int64_t(stage)); }
  void stamp_embedding() { add_to(0); }
  void stamp_head() { add_to(1 + layers_ * kLayerStages); }

 private:
  void add_to(int64_t at) {
    if (!times_) return;
    const int64_t now = now_ns();
    times_[at] += now - last_;
    last_ = now;
  }

  int64_t* times_;
  int64_t layers_, layer_ = 0, last_;
};

}  // namespace labkit
