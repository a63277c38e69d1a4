// The begin and the end of a step: embedding or input rows, logits or output rows.
#pragma once

#include "../qkv_gemm/cpp_impl.cpp"
#include "step.h"

namespace labkit {

// A token's row of the embedding table, which is the LM head if they are tied; zeros if another rank has the row.
inline void look_up(const Embedding& embedding, int64_t token, float* row) {
  const int64_t width = embedding.size, n = token - embedding.begin;
  if (n < 0 || n >= embedding.rows)
    std::memset(row, 0, size_t(width) * sizeof(float));
  else if (const Stored* table = static_cast<const Stored*>(embedding.table))
    for (int64_t k = 0; k < width; ++k) row[k] = to_float(table[n * width + k]);
  else
    for (int64_t k = 0; k < width; ++k) row[k] = weight_of<Weight>(embedding.packed, n, k);
}

// h = norm(token embedding (scaled, projected) + learned position), or norm(token embedding) + learned position.
inline void embed(Team& team, int thread, Ranks& ranks, const Model& model, const Chunk& chunk, Workspace& work,
                  int64_t stride, ThreadScratch& scratch) {
  const Embedding& embedding = model.embedding;
  const int64_t rows = chunk.count(), width = embedding.size;
  const bool project = embedding.project_in.weight;
  float* target = project ? work.residual : work.h;
  const Range mine = team.share(rows, thread);
  if (!ranks.alone()) {
    for (int64_t m = mine.begin; m < mine.end; ++m)
      look_up(embedding, chunk.tokens[m], ranks.own<float>() + m * stride);
    ranks.meet(team, thread, rows * stride * int64_t(sizeof(float)));
  }
  for (int64_t m = mine.begin; m < mine.end; ++m) {
    float* row = target + m * stride;
    if (ranks.alone())
      look_up(embedding, chunk.tokens[m], row);
    else
      add_parts(Parts(ranks, stride), m, 0, width, [=](int64_t i, float sum) { row[i] = sum; });
    if (embedding.scale != 1.0f)
      for (int64_t i = 0; i < width; ++i) row[i] *= embedding.scale;
    if (project) to_activation(row, width, padded_depth<Weight>(width), work.x + m * stride);
  }
  if (project) {
    team.barrier();
    gemm_into<Weight>(team, thread, embedding.project_in, work.x, stride, rows, work.h, stride, scratch);
    team.barrier();
  }
  for (int64_t m = mine.begin; m < mine.end; ++m) {
    float* row = work.h + m * stride;
    const bool norm = embedding.norm.kind != kNoNorm;
    if (norm && embedding.norm_first) normalise(embedding.norm, row, model.hidden, row);
    if (embedding.positions) {
      const int64_t at = chunk.rows.positions[m] + embedding.position_offset;
      const float* position = embedding.positions + at * model.hidden;
      for (int64_t i = 0; i < model.hidden; ++i) row[i] += position[i];
    }
    if (norm && !embedding.norm_first) normalise(embedding.norm, row, model.hidden, row);
  }
  team.barrier();
}

// h = the caller's rows.
inline void take_inputs(Team& team, int thread, const Model& model, const Chunk& chunk, Workspace& work,
                        int64_t stride) {
  const Range mine = team.share(chunk.count(), thread);
  for (int64_t m = mine.begin; m < mine.end; ++m)
    std::memcpy(work.h + m * stride, chunk.inputs + m * model.hidden, size_t(model.hidden) * 4);
  team.barrier();
}

// A rank's part in a gather of logits: its columns of some rows.
struct alignas(64) Columns {
  int64_t begin, count;
};

// Every rank gets the columns of the other ranks, a few rows at a time. logits: [rows][vocab], with this rank's
// columns.
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
    if (ranks.failed()) return;  // unwritten columns of another rank could point anywhere
    for (int r = 0; r < ranks.count(); ++r) {
      const Columns columns = *ranks.of<Columns>(r);
      if (columns.begin == own.begin) continue;
      const float* from = reinterpret_cast<const float*>(ranks.of<Columns>(r) + 1);
      for (int64_t m = mine.begin; m < mine.end; ++m)
        std::memcpy(logits + (first + m) * vocab + columns.begin, from + m * columns.count, size_t(columns.count) * 4);
    }
  }
}

// Caps this rank's columns of the logits [rows][vocab]. Ends after a barrier.
inline void cap_logits(Team& team, int thread, const Head& head, int64_t rows, float* logits) {
  const Range mine = team.share(head.matrix.outputs, thread);
  for (int64_t m = 0; m < rows; ++m) {
    float* row = logits + m * head.vocab + head.begin;
    int64_t i = mine.begin;
    for (; i + kWidth <= mine.end; i += kWidth) store(row + i, soft_capped(load(row + i), head.cap));
    for (; i < mine.end; ++i) row[i] = soft_capped(broadcast(row[i]), head.cap)[0];
  }
  team.barrier();
}

// Logits or argmax of the last `keep` tokens of each sequence.
inline void head_step(Team& team, int thread, Ranks& ranks, const Model& model, const Chunk& chunk, bool own_logits,
                      Workspace& work, int64_t stride, ThreadScratch& scratch) {
  const int64_t tokens = chunk.rows.tokens, kept = int64_t(chunk.rows.batch) * chunk.keep;
  const float* h = work.h;
  if (chunk.keep < tokens) {
    const Range mine = team.share(kept, thread);
    for (int64_t m = mine.begin; m < mine.end; ++m) {
      const int64_t row = m / chunk.keep * tokens + tokens - chunk.keep + m % chunk.keep;
      std::memcpy(work.mlp_out + m * stride, work.h + row * stride, size_t(model.hidden) * 4);
    }
    team.barrier();
    h = work.mlp_out;
  }
  Normalised<Weight> input = normalised_rows<Weight>(team, thread, model.final_norm, h, stride, {}, true, kept,
                                                     model.hidden, stride, work.x, work.residual, scratch);
  if (chunk.hidden && thread == 0)
    for (int64_t m = 0; m < kept; ++m)
      std::memcpy(chunk.hidden + m * model.hidden, input.residual + m * input.residual_stride,
                  size_t(model.hidden) * 4);
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
  if (chunk.logits) {
    gemm_into<Weight>(team, thread, head.matrix, input.x, input.stride, kept, chunk.logits + head.begin, head.vocab,
                      scratch);
    team.barrier();
    if (head.cap != 0.0f) cap_logits(team, thread, head, kept, chunk.logits);
    if (!ranks.alone() && !own_logits) gather_logits(team, thread, ranks, model, kept, chunk.logits);
    return;
  }
  // A cap keeps the order of the logits.
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
    chunk.argmax[m] = most.index;
  }
}

// Returns every row, after the final norm if any (in an encoder the last layer's own). Its time counts for the last
// stage of the last layer.
inline void give_outputs(Team& team, int thread, const Model& model, const Chunk& chunk, const Workspace& work,
                         int64_t stride, Clock& clock) {
  const Range mine = team.share(chunk.count(), thread);
  for (int64_t m = mine.begin; m < mine.end; ++m)
    normalise(model.final_norm, work.h + m * stride, model.hidden, chunk.outputs + m * model.hidden);
  team.barrier();
  clock.stamp(LayerStage::kResidual);
}

}  // namespace labkit
