// One decoding, as a driver gets it: blocks of a packed weight in device memory, to a place in device memory.
#pragma once

#include <cstdint>
#include <vector>

#include "driver/driver.h"
#include "packed/packed_block.h"

namespace penstock {

struct DecodeCall {
  PackedKind kind;
  Address packed;  // the first block
  // Where each block begins, from `packed` on, and where the last ends.
  std::vector<int64_t> begins_bytes;
  // Of the weight: bytes [begin, end) of the blocks are wanted, and so many it has from the first block on.
  int64_t begin_bytes;
  int64_t end_bytes;
  int64_t weight_bytes;
  Address out;  // of byte `begin`
  // As fast as the device can. Otherwise some of it is enough to keep up with a link, and steps have the rest.
  bool wide;
};

}  // namespace penstock
