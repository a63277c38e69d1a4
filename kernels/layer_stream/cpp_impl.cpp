// A stream of layers, as Python makes, watches and ends it.
#pragma once

#include "stream.h"

extern "C" {

labkit::LayerStream* labkit_stream_open(int32_t fd, const labkit::Block* blocks, int64_t count, char* slots,
                                        int64_t slot_bytes, int64_t slot_count, int64_t read_bytes) {
  return new labkit::LayerStream(fd, blocks, count, slots, slot_bytes, slot_count, read_bytes);
}

// Ends the reader; nobody may wait any more.
void labkit_stream_close(labkit::LayerStream* stream) { delete stream; }

int64_t labkit_stream_begin_pass(labkit::LayerStream* stream) { return stream->begin_pass(); }

void labkit_stream_wait(labkit::LayerStream* stream, int64_t turn) { stream->wait(turn); }

int64_t labkit_stream_filled(const labkit::LayerStream* stream, int64_t turn) { return stream->filled(turn); }

void labkit_stream_release(labkit::LayerStream* stream, int64_t turn) { stream->release(turn); }

void labkit_stream_note(labkit::LayerStream* stream, int64_t kind, int64_t layer, int64_t begin_ns, int64_t end_ns) {
  stream->note(labkit::SpanKind(kind), layer, begin_ns, end_ns);
}

void labkit_stream_state(const labkit::LayerStream* stream, labkit::StreamState* state) { *state = stream->state(); }

int64_t labkit_stream_take_spans(labkit::LayerStream* stream, labkit::Span* to, int64_t most) {
  return stream->take_spans(to, most);
}

int64_t labkit_digest(const void* data, int64_t bytes) { return int64_t(labkit::digest_of(data, size_t(bytes))); }

}  // extern "C"
