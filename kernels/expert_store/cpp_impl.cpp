// C interface: creates, watches and ends a store of experts.
#pragma once

#include "store.h"

extern "C" {

labkit::ExpertStore* labkit_expert_store_open(int32_t fd, const labkit::StoredExpert* experts, int64_t layers,
                                              int64_t per_layer, const int64_t* bytes, char* slots, int64_t slot_bytes,
                                              int64_t slot_count) {
  return labkit::opened(
      [&] { return new labkit::ExpertStore(fd, experts, layers, per_layer, bytes, slots, slot_bytes, slot_count); });
}

// Ends the threads. No step may use the store any more.
void labkit_expert_store_close(labkit::ExpertStore* store) { delete store; }

int64_t labkit_expert_slot_bytes(const int64_t* bytes) { return labkit::ExpertFile::slot_bytes(bytes); }

void labkit_expert_store_counts(const labkit::ExpertStore* store, labkit::ExpertCounts* counts) {
  *counts = store->counts();
}

void labkit_expert_store_begin_pass(labkit::ExpertStore* store) { store->begin_pass(); }

void labkit_expert_store_want(labkit::ExpertStore* store, int64_t layer, const int64_t* experts, int64_t count) {
  store->want(layer, experts, count, true);
}

int64_t labkit_expert_store_next_wave(labkit::ExpertStore* store, int64_t* rest) { return store->next_wave(rest); }

int64_t labkit_expert_store_part(const labkit::ExpertStore* store, int64_t layer, int64_t expert, int64_t part) {
  return int64_t(store->part(layer, expert, part));
}

}  // extern "C"
