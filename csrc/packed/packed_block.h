// Packs and unpacks one block of a weight on the host: sign and mantissa as they are, exponents as codes for the
// block's most frequent ones. docs/format.md has the layout, byte by byte.
#pragma once

#include <cstddef>
#include <cstdint>

namespace penstock {

// What the values are, and how their exponents are coded: in three bits each, or in three levels. Files contain these
// numbers.
enum class PackedKind : int32_t {
  bfloat16 = 1,
  float32 = 2,
  float16 = 3,
  float8_e4m3 = 4,
  float8_e5m2 = 5,
  bfloat16_levels = 6,
};
constexpr int32_t kPackedKinds = 6;

// Raw bytes in a block. Every block but a weight's last has this many.
constexpr int64_t kBlockRawBytes = 64 << 10;
constexpr int64_t kTileValues = 1024;
// Sizes of blocks are multiples of this.
constexpr int64_t kPackedUnitBytes = 16;

bool is_packed_kind(int32_t kind);
int64_t item_bytes(PackedKind kind);

// Where the parts of a block begin, for a block of `raw_bytes`.
struct BlockLayout {
  BlockLayout(PackedKind kind, int64_t raw_bytes);
  int64_t values;
  int64_t tiles;
  int64_t tile_planes_bytes;
  int64_t planes_at;
  int64_t rests_at;
  int64_t rests_end;
};

// The fewest and the most bytes that a block can have.
int64_t least_block_bytes(PackedKind kind, int64_t raw_bytes);
int64_t most_block_bytes(PackedKind kind, int64_t raw_bytes);

// Returns the bytes written, at most most_block_bytes.
int64_t pack_block(PackedKind kind, const unsigned char* raw, int64_t raw_bytes, unsigned char* packed);

// Unpacks bytes [begin, end) of the block's `raw_bytes`. Whatever the packed bytes contain, nothing outside of them is
// read; there must be at least least_block_bytes.
void unpack_block(PackedKind kind, const unsigned char* packed, int64_t packed_bytes, int64_t raw_bytes, int64_t begin,
                  int64_t end, unsigned char* out);

}  // namespace penstock
