// Writes to a mailbox and reads from it, until the wait for the other process exceeds `patience_ns`. The caller then
// checks whether that process still runs, and goes on.
#pragma once

#include "mailbox.h"

extern "C" int64_t labkit_mailbox_write(labkit::Mailbox* box, int64_t capacity, const char* from, int64_t count,
                                        int64_t patience_ns) {
  const int64_t written = box->written.load(std::memory_order_relaxed);
  if (box->read.load(std::memory_order_acquire) == written) box->base.store(written, std::memory_order_relaxed);
  return labkit::move_bytes(
      box->written, box->base, capacity, count, patience_ns,
      [&](int64_t at) { return capacity - (at - box->read.load(std::memory_order_acquire)); },
      [&](int64_t place, int64_t done, int64_t bytes) {
        std::memcpy(box->bytes() + place, from + done, size_t(bytes));
      });
}

extern "C" int64_t labkit_mailbox_read(labkit::Mailbox* box, int64_t capacity, char* to, int64_t count,
                                       int64_t patience_ns) {
  return labkit::move_bytes(
      box->read, box->base, capacity, count, patience_ns,
      [&](int64_t at) { return box->written.load(std::memory_order_acquire) - at; },
      [&](int64_t place, int64_t done, int64_t bytes) { std::memcpy(to + done, box->bytes() + place, size_t(bytes)); });
}
