// One decoding, as a driver gets it: from packed blocks of a weight in device memory to another place in device memory.
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
  // Unpacked: bytes [begin, end) of the blocks are wanted; the weight has weight_bytes from the first block on.
  int64_t begin_bytes;
  int64_t end_bytes;
  int64_t weight_bytes;
  Address out;  // where byte `begin` goes
  // As fast as the device can. Otherwise it takes only enough of the device to keep up with a link; steps get the rest.
  bool wide;
};

}  // namespace penstock
