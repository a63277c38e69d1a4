// C interface: creates a stream of layers.
#pragma once

#include "../slot_stream/cpp_impl.cpp"

#include "stream.h"

extern "C" {

labkit::SlotStream* labkit_layer_stream_open(int32_t fd, const labkit::Block* blocks, int64_t count, char* slots,
                                             int64_t slot_bytes, int64_t slot_count) {
  return labkit::opened([&] { return new labkit::LayerStream(fd, blocks, count, slots, slot_bytes, slot_count); });
}

int64_t labkit_digest(const void* data, int64_t bytes) { return int64_t(labkit::digest_of(data, size_t(bytes))); }

}  // extern "C"
