// C interface for watching and ending streams of either kind.
#pragma once

#include "slot_stream.h"

extern "C" {

// Ends the threads. No thread may wait for the stream any more.
void labkit_stream_close(labkit::SlotStream* stream) { delete stream; }

int64_t labkit_stream_begin_pass(labkit::SlotStream* stream, int64_t committed) {
  return stream->begin_pass(committed);
}

void labkit_stream_wait(labkit::SlotStream* stream, int64_t turn) { stream->wait(turn); }

int64_t labkit_stream_filled(const labkit::SlotStream* stream, int64_t turn) { return stream->filled(turn); }

void labkit_stream_release(labkit::SlotStream* stream, int64_t turn, int64_t begin, int64_t end) {
  stream->release(turn, {begin, end});
}

void labkit_stream_flush(labkit::SlotStream* stream) { stream->flush(); }

void labkit_stream_note(labkit::SlotStream* stream, int64_t kind, int64_t layer, int64_t begin_ns, int64_t end_ns) {
  stream->note(labkit::SpanKind(kind), layer, begin_ns, end_ns);
}

int64_t labkit_stream_pass_failed(const labkit::SlotStream* stream) { return stream->pass_failed(); }

void labkit_stream_state(const labkit::SlotStream* stream, labkit::StreamState* state) { *state = stream->state(); }

int64_t labkit_stream_take_spans(labkit::SlotStream* stream, labkit::Span* to, int64_t most) {
  return stream->take_spans(to, most);
}

}  // extern "C"
