// Layers that are read from a file. Each is compared with its digest when it is first read, and again after the file
// was changed.
#pragma once

#include "../slot_stream/slot_stream.h"
#include "file_identity.h"
#include "xxh64.h"

namespace labkit {

// Created by Python (layer_stream/__init__.py). Offset and bytes are multiples of kPage.
struct Block {
  int64_t layer, offset, bytes;
  uint64_t digest;
};

class LayerStream final : public SlotStream {
 public:
  LayerStream(int fd, const Block* blocks, int64_t count, char* slots, int64_t slot_bytes, int64_t slot_count)
      : SlotStream(fd, count, slots, slot_bytes, slot_count, slot_count),
        blocks_(blocks, blocks + count),
        verified_(size_t(count)),
        identity_(file_.fd()) {
    start();
  }
  ~LayerStream() override { stop(); }

 private:
  int64_t layer_of(int64_t index) const override { return blocks_[size_t(index)].layer; }

  Outcome read_piece(int64_t index, char* to) override {
    const Block& block = blocks_[size_t(index)];
    const FileIdentity before(file_.fd());
    for (int64_t done = 0; done < block.bytes && !stopping();) {
      const int64_t left = block.bytes - done, offset = block.offset + done;
      const ssize_t got = file_.read(to + done, left < kAtOnce ? left : kAtOnce, offset);
      if (got < 0) return {kReadError, errno, offset};
      if (got == 0) return {kEnds, 0, offset};
      done += got;
    }
    const FileIdentity now(file_.fd());
    if (!(now == identity_)) {
      identity_ = now;
      verified_.assign(verified_.size(), false);
    }
    if (!verified_[size_t(index)] && !stopping()) {
      if (digest_of(to, size_t(block.bytes)) != block.digest) return {kAltered, 0, block.offset};
      verified_[size_t(index)] = before == now;  // else these bytes may be older than a change of the file meanwhile
    }
    return {kWhole, 0, 0, block.bytes};
  }

  const std::vector<Block> blocks_;
  std::vector<bool> verified_;  // only the reader uses it, like identity_
  FileIdentity identity_;
};

}  // namespace labkit
