// The structs that Python passes, mirrored field by field in abi.py and decode_step/weights.py. Every pointer is
// borrowed for the call.
#pragma once

#include <cstdint>

namespace labkit {

struct bf16;  // simd.h

enum NormKind : int32_t { kNoNorm = 0, kLayerNorm = 1, kRmsNorm = 2 };
enum ActivationKind : int32_t { kGelu = 0, kGeluTanh = 1, kRelu = 2, kSilu = 3, kReluSquared = 4, kClampedSwiglu = 5 };

struct Norm {
  int32_t kind;
  float eps;
  const float* weight;
  const float* bias;  // may be null
};

struct Linear {
  const void* weight;  // packed as in gemm/tile.h
  const float* bias;   // may be null
  int64_t outputs, inputs;
  const void* scales;  // fp16 [blocks][groups][1 or 2][32]: scales, and minima if asymmetric; null: not quantised
  int64_t group;       // number of k that share a scale
  int32_t bits;        // of a code: 8 or 4
  int32_t asymmetric;
  int32_t activation_bits;  // 16, or 8 if activations may be rounded to 8 bits
};

// The token of each row of the activations, and the slots that it sees. rows = batch * tokens, row-major.
struct Rows {
  int32_t batch, tokens;
  const int32_t* positions;      // [rows]: position of the token in its own sequence
  const int32_t* first;          // [batch]: first cache slot that holds a token (left padding before it)
  const uint8_t* visible;        // [batch][visible_stride], 0 hides a slot; null: all slots from `first` on are visible
  const int32_t* key_positions;  // [batch][visible_stride]: position of each slot, for ALiBi; else may be null
  int64_t visible_stride;
  int64_t alike;   // sequences of a group; they are consecutive
  int64_t shared;  // first slots that are equal in a group: keys, values, positions, and what is visible
};

struct Heads {
  int32_t query, kv, dim, padded_dim;  // padded_dim: dim rounded up to 16, the cache's row length
};

// Keys and values of one layer, [batch][kv heads][capacity][padded_dim] each; slots before `past` are filled.
struct Cache {
  void* keys;
  void* values;
  int64_t capacity, past;
  bf16* key_scales;  // [batch][kv heads][capacity], of int8 keys and values (int8_cache.h); null: they are `Stored`
  bf16* value_scales;
};

struct Rotary {
  const float* cosine;  // [positions][dim / 2]
  const float* sine;
  int32_t dim, interleaved;  // dim 0: no rotation
  int64_t table;             // numbers of a table; 0: there is one
};

struct QkvWeights {
  Norm norm;
  Linear proj;
  const float* q_norm;  // [head dim], RMS; null: no norm
  const float* k_norm;
  float qk_eps;
  int32_t table;        // of the rotary embedding's tables
  int32_t whole_norms;  // the norms are over all query heads, and all key heads, together
};

struct AttentionParams {
  float scale;
  int32_t window;       // 0: all
  int32_t causal;       // 0: every token sees its whole sequence
  const float* slopes;  // [query heads]; null: no ALiBi
  float cap;            // a score s becomes cap * tanh(s / cap); 0: no cap
  const float* sinks;   // [query heads]: a score that takes part in the softmax and has no value; null: none
};

struct MlpWeights {
  Norm norm;
  Linear up;  // gated: blocks alternate 16 gate rows, 16 up rows
  int32_t activation, gated;
  Norm addend_norm;  // of the attention's output, before it is added to the residual
};

// An MLP whose two matrices every row passes.
struct DenseMlp {
  MlpWeights region;  // region 3
  Linear out;
  Norm out_norm;  // of the MLP's output, before it is added to the residual
};

// A mixture of MLPs, of which each row passes some. All have the same sizes and no norms.
struct ExpertMlps {
  const MlpWeights* regions;  // [count]
  const Linear* outs;         // [count]
  int64_t count;
};

// The choice of experts.
struct Router {
  Linear matrix;             // one output for each expert
  const float* choice_bias;  // [experts], added to the scores for the choice alone; null: none
  int64_t chosen;            // experts of a row
  int32_t renormalised;      // whether the shares of a row add up to 1, before `factor`
  int32_t sigmoid;           // scores are sigmoids of the logits; 0: their softmax
  float factor;              // multiplies the shares
};

// What a layer has instead of an MLP that every row passes.
struct Mixture {
  Router router;
  ExpertMlps experts;  // of this rank
  int64_t first;       // the number of the first of them
  Linear shared_gate;  // the output of the shared expert is multiplied by the sigmoid of this one's; null weight: by 1
};

struct Layer {
  QkvWeights qkv;
  AttentionParams attention;
  Linear attn_out;
  DenseMlp mlp;            // with a mixture: the shared expert, if it has weights; its norms are the mixture's
  const Mixture* mixture;  // null: `mlp` alone
};

// Tokens in, rows out. With `size` 0 this range of layers has no embedding and begins with rows.
struct Embedding {
  const void* table;  // [rows][size]; null: the rows of `packed`
  Linear packed;      // the matrix of a tied LM head; null weight: not tied
  int64_t size;
  int64_t begin, rows;  // the first token that has a row in this rank's table, and the number of these tokens
  Norm norm;
  Linear project_in;       // null weight: none
  const float* positions;  // [positions][hidden], learned; null: none
  int32_t position_offset;
  float scale;         // multiplies the rows of the table
  int32_t norm_first;  // whether the positions are added to the normed rows
};

// Rows in, logits out. Without a matrix this range of layers ends with rows.
struct Head {
  Linear project_out;  // null weight: none
  Linear matrix;
  int64_t begin, vocab;  // the first token whose logit this rank computes, and the size of the whole vocabulary
  float cap;             // a logit x becomes cap * tanh(x / cap); 0: no cap
};

// A range of layers, with or without embedding and head.
struct Model {
  int64_t num_layers, hidden, intermediate;
  Heads heads;
  int32_t parallel_residual, residual_from_norm;
  const Layer* layers;
  Embedding embedding;
  Norm final_norm;  // of the rows after the last layer, with or without a head; none if other layers follow
  Head head;
};

}  // namespace labkit
