// What a decoding kernel is launched with. Values and tiles count from the first block that is given.
#pragma once

namespace penstock {

// A launch's parameters have at most 4 KiB.
constexpr unsigned kMostBlocksALaunch = 960;

struct DecodeParams {
  const unsigned char* packed;  // the first block
  unsigned char* out;           // where its first value would go
  unsigned first_tile;
  unsigned end_tile;
  unsigned begin_value;
  unsigned end_value;
  // That the weight has from the first block on, beyond what is asked for: the last block of a weight is shorter.
  unsigned total_tiles;
  unsigned begins[kMostBlocksALaunch + 1];  // of the blocks, from `packed`, in units of 16 bytes
};

}  // namespace penstock
