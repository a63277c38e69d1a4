// C interface: creates a stream of keys and values.
#pragma once

#include "../slot_stream/cpp_impl.cpp"

#include "stream.h"

extern "C" {

labkit::SlotStream* labkit_cache_stream_open(int32_t fd, int64_t layers, const labkit::Section* sections, int64_t count,
                                             int64_t filled, char* slots, int64_t slot_bytes, int64_t slot_count) {
  return labkit::opened(
      [&] { return new labkit::CacheStream(fd, layers, sections, count, filled, slots, slot_bytes, slot_count); });
}

}  // extern "C"
