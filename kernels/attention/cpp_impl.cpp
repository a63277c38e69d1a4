// Region 2: scores, softmax and context of new queries against the KV cache.
//
// The cache keeps each head's keys and values in consecutive slots, [batch][KV head][slot][head_dim], so the slots of a
// head are one forward stream.
#pragma once

#include "cached.h"
#include "parts.h"
#include "prompt.h"

namespace labkit {

// With more new tokens than this it pays to pack the keys and values of a head (prompt.h).
constexpr int32_t kMostCachedTokens = 2 * kMaxRows;

// One region's arguments. qkv: [rows][qkv_stride] with the rotated queries first; context: [rows][context_stride], one
// query head after the other, followed by zeros up to the deepest padding that a GEMM reads.
template <class X>
struct AttentionCall {
  const AttentionParams& params;
  const Heads& heads;
  const Rows& rows;
  const Cache& cache;
  const float* qkv;
  int64_t qkv_stride;
  X* context;
  int64_t context_stride;

  int64_t slots() const { return cache.past + rows.tokens; }
  // The most slots that the tokens of a sequence see.
  int64_t seen() const { return params.window ? std::min(slots(), params.window + rows.tokens - int64_t(1)) : slots(); }
  int64_t group() const { return heads.query / heads.kv; }  // query heads that share a KV head

  const float* query(int64_t b, int64_t token, int64_t head) const {
    return qkv + (b * rows.tokens + token) * qkv_stride + head * heads.dim;
  }

  Sight sight(int64_t b, int64_t token, int64_t head) const {
    Sight sight{rows.first[b], cache.past + (params.causal ? token + 1 : rows.tokens), 0.0f};
    if (params.window && sight.high - params.window > sight.low) sight.low = sight.high - params.window;
    if (sight.low > sight.high) sight.low = sight.high;
    if (params.slopes) sight.slope = params.slopes[head];
    return sight;
  }

  float sink(int64_t head) const { return params.sinks ? params.sinks[head] : -INFINITY; }

  SlotFacts facts(int64_t b) const {
    return {rows.visible ? rows.visible + b * rows.visible_stride : nullptr,
            rows.key_positions ? rows.key_positions + b * rows.visible_stride : nullptr};
  }

  void give(int64_t b, int64_t token, int64_t head, const float* out) const {
    const int64_t width = int64_t(heads.query) * heads.dim, at = head * heads.dim;
    const int64_t end = at + heads.dim == width ? padded_depth<int8_t>(width) : at + heads.dim;
    to_activation(out, heads.dim, end - at, context + (b * rows.tokens + token) * context_stride + at);
  }
};

// How the queries that read some slots of the cache are divided: into tiles of one KV head of `alike` sequences, in
// which these slots are equal. The slots of a tile have parts.
struct CachedTiles {
  int64_t alike, of_sequence, group, kv;   // queries of a KV head of one sequence; query heads that share a KV head
  int64_t queries, of_head, tiles, parts;  // queries of a KV head, tiles of a KV head, all tiles, most parts of each

  // seen: the most slots that the queries of a tile read; 0: there are no tiles.
  CachedTiles(const Heads& heads, const Rows& rows, int64_t alike, int64_t seen)
      : alike(alike),
        of_sequence(int64_t(rows.tokens) * (heads.query / heads.kv)),
        group(heads.query / heads.kv),
        kv(heads.kv),
        queries(alike * of_sequence),
        of_head(ceil_div(queries, kMostQueries)),
        tiles(seen > 0 ? rows.batch / alike * kv * of_head : 0),
        parts(tiles ? parts_among(seen) : 0) {}

  // How many parts a tile's slots have. Their number does not depend on other sequences, and so no result does.
  int64_t parts_among(int64_t slots) const { return parts_of(kv * of_head, slots); }

  int64_t first(int64_t tile) const { return tile % of_head * kMostQueries; }
  int64_t count(int64_t tile) const { return std::min(queries - first(tile), int64_t(kMostQueries)); }
  int64_t most() const { return std::min(queries, int64_t(kMostQueries)); }
  int64_t bytes(int padded_dim) const { return PartialContexts::bytes(tiles, parts, most(), padded_dim); }

  // The number, among the heads of all sequences, of the head that a tile reads.
  int64_t slots_of(int64_t tile) const { return tile / of_head / kv * alike * kv + tile / of_head % kv; }

  // A query of a tile.
  struct Place {
    int64_t sequence, token, head;
  };
  Place place(int64_t tile, int64_t r) const {
    const int64_t query = first(tile) + r, own = query % of_sequence, kv_head = tile / of_head % kv;
    return {tile / of_head / kv * alike + query / of_sequence, own / group, kv_head * group + own % group};
  }

  // The tile with a query, and the query's row in it.
  std::pair<int64_t, int64_t> find(const Place& place) const {
    const int64_t own = place.token * group + place.head % group, set = place.sequence / alike;
    const int64_t query = place.sequence % alike * of_sequence + own;
    return {(set * kv + place.head / group) * of_head + query / kMostQueries, query % kMostQueries};
  }
};

// The tiles of a region for few new tokens: `common` read the slots that sequences share, `own` read all others.
struct TilesOfCache {
  int64_t shared;  // slots
  CachedTiles common, own;

  // seen: the most slots, of `slots`, that the tokens of a sequence see.
  TilesOfCache(const Heads& heads, const Rows& rows, int64_t slots, int64_t seen)
      : shared(rows.alike > 1 ? std::min(rows.shared, slots - rows.tokens) : 0),
        common(heads, rows, rows.alike, std::min(shared, seen)),
        own(heads, rows, 1, std::min(slots - shared, seen)) {}

  bool merges() const { return shared > 0 || own.parts > 1; }
};

// Bytes of the memory that the threads share in a region; enough for layers with any window.
inline int64_t attention_bytes(const Heads& heads, const Rows& rows, int64_t slots) {
  if (rows.tokens > kMostCachedTokens) return 0;
  const TilesOfCache tiles(heads, rows, slots, slots);
  return tiles.merges() ? tiles.common.bytes(heads.padded_dim) + tiles.own.bytes(heads.padded_dim) : 0;
}

// Attends with the queries of a tile to its slots within `among`: to part `part` of them.
template <class T, class X>
void attend_tile(const AttentionCall<X>& call, const CachedTiles& tiles, int64_t tile, int64_t part, Range among,
                 float* rows, Softmax* sums, float* context) {
  const int64_t dim = call.heads.padded_dim;
  Queries queries{int(tiles.count(tile)), rows, {}};
  for (int r = 0; r < queries.count; ++r) {
    const auto [b, token, head] = tiles.place(tile, r);
    to_activation(call.query(b, token, head), call.heads.dim, dim, rows + r * dim);
    queries.sights[r] = call.sight(b, token, head);
  }
  const HeadSlots<T> head(call.cache, tiles.slots_of(tile), int(dim));
  const Range all = queries.seen();
  const int64_t begin = std::max(all.begin, among.begin), end = std::max(begin, std::min(all.end, among.end));
  const Range seen{begin, end};
  const int64_t parts = tiles.parts_among(end - begin);
  const Range slots = part_of(seen, part, parts);
  const T* next = head.keys + (part + 1 < parts ? slots.end : call.cache.capacity + seen.begin) * dim;
  const int64_t sequence = tiles.place(tile, 0).sequence;
  attend(queries, head, call.params, call.facts(sequence), slots, next, sums, context);
}

// The region for few new tokens. Units of work are dealt out, because every thread is slow at times.
template <class T, class X>
void attend_cached(Team& team, int thread, const AttentionCall<X>& call, char* memory, ThreadScratch& scratch) {
  const int64_t dim = call.heads.padded_dim;
  const TilesOfCache tiles(call.heads, call.rows, call.slots(), call.seen());
  const CachedTiles &common = tiles.common, &own = tiles.own;
  const PartialContexts of_common(memory, common.parts, common.most(), int(dim));
  const PartialContexts of_own(memory + common.bytes(int(dim)), own.parts, own.most(), int(dim));
  float* const rows = scratch.scores.get<float>(size_t(2 * kMostQueries * dim));
  float* const context = rows + kMostQueries * dim;
  const auto give = [&](int64_t tile, int64_t r, const Softmax& sums, float* out) {
    const auto [b, token, head] = own.place(tile, r);
    sums.divide(out, dim, call.sink(head));
    call.give(b, token, head, out);
  };

  const int64_t common_units = common.tiles * common.parts;
  team.deal(common_units + own.tiles * own.parts, thread, [&](int64_t unit) {
    const bool is_common = unit < common_units;
    const CachedTiles& of = is_common ? common : own;
    const int64_t at = is_common ? unit : unit - common_units, tile = at / of.parts, part = at % of.parts;
    const Range among = is_common ? Range{0, tiles.shared} : Range{tiles.shared, call.slots()};
    Softmax sums[kMostQueries];
    attend_tile<T>(call, of, tile, part, among, rows, sums, context);
    if (tiles.merges()) return (is_common ? of_common : of_own).keep(tile, part, of.count(tile), sums, context);
    for (int64_t r = 0; r < of.count(tile); ++r) give(tile, r, sums[r], context + r * dim);
  });
  team.barrier();
  if (!tiles.merges()) return;
  team.deal(own.tiles, thread, [&](int64_t tile) {
    for (int64_t r = 0; r < own.count(tile); ++r) {
      const auto [shared_tile, shared_row] = common.find(own.place(tile, r));
      Softmax all;
      all.top = of_own.top(tile, r);
      if (common.tiles) all.top = std::max(all.top, of_common.top(shared_tile, shared_row));
      std::memset(context, 0, size_t(dim) * sizeof(float));
      if (common.tiles) of_common.add(shared_tile, shared_row, all, context);
      of_own.add(tile, r, all, context);
      give(tile, r, all, context);
    }
  });
  team.barrier();
}

// The region for many new tokens. The unit of work is some dozens of queries of one head of one sequence. Units are
// dealt out, because under a causal mask late tokens see more slots than early tokens.
template <class T, class X>
void attend_prompt(Team& team, int thread, const AttentionCall<X>& call, ThreadScratch& scratch) {
  const Heads& heads = call.heads;
  const int64_t tokens = call.rows.tokens, tiles = ceil_div(tokens, kPromptRows);
  PackedHead<X> packed(scratch.head, heads.padded_dim, call.slots());
  PromptQueries<X> queries(scratch, heads.padded_dim);
  alignas(64) float out[kMostDim];

  team.deal(call.rows.batch * heads.query * tiles, thread, [&](int64_t unit) {
    const int64_t b = unit / (heads.query * tiles), query_head = unit / tiles % heads.query;
    const int64_t first = unit % tiles * kPromptRows, count = std::min(tokens - first, kPromptRows);
    const int64_t id = b * heads.kv + query_head / call.group();
    const HeadSlots<T> head(call.cache, id, heads.padded_dim);
    packed.pack(id, head, call.sight(b, 0, query_head).low, call.slots());
    for (int64_t r = 0; r < count; ++r) {
      queries.put(r, call.query(b, first + r, query_head), heads.dim);
      queries.sights[r] = call.sight(b, first + r, query_head);
    }
    queries.attend(count, packed, head, call.params, call.facts(b));
    for (int64_t r = 0; r < count; ++r) {
      queries.context(r, call.sink(query_head), out);
      call.give(b, first + r, query_head, out);
    }
  });
  team.barrier();
}

// The region on a cache of T, or of int8 if it has scales. shared: attention_bytes(). Ends after a barrier.
template <class T>
void attention_region(Team& team, int thread, const AttentionCall<Activation<T>>& call, char* shared,
                      ThreadScratch& scratch) {
  const bool prompt = call.rows.tokens > kMostCachedTokens;
  if (call.cache.key_scales)
    prompt ? attend_prompt<int8_t>(team, thread, call, scratch)
           : attend_cached<int8_t>(team, thread, call, shared, scratch);
  else
    prompt ? attend_prompt<T>(team, thread, call, scratch) : attend_cached<T>(team, thread, call, shared, scratch);
}

}  // namespace labkit

// queries and context: [rows][query heads * dim].
extern "C" int64_t labkit_attention(const labkit::AttentionParams* params, const labkit::Heads* heads,
                                    const labkit::Rows* rows, const labkit::Cache* cache, const float* queries,
                                    float* context, int32_t threads) {
  using namespace labkit;
  return guarded([&]() -> int64_t {
    Team team(threads);
    const int64_t count = int64_t(rows->batch) * rows->tokens, width = int64_t(heads->query) * heads->dim;
    const int64_t stride = row_stride(width);
    Act* staged = call_buffers().context.get<Act>(count * stride);
    char* shared = call_buffers().attention.get<char>(attention_bytes(*heads, *rows, cache->past + rows->tokens));
    const AttentionCall<Act> call{*params, *heads, *rows, *cache, queries, width, staged, stride};
    run_team(team, threads, [&](int thread) {
      attention_region<Stored>(team, thread, call, shared, thread_scratch());
      const Range mine = team.share(count, thread);
      for (int64_t m = mine.begin; m < mine.end; ++m)
        for (int64_t i = 0; i < width; ++i) context[m * width + i] = to_float(staged[m * stride + i]);
    });
    return 0;
  });
}
