// Packing and unpacking on the host, in threads. The commands pack and unpack, and verification, use it.
#include <algorithm>
#include <cstring>
#include <vector>

#include "packed/packed_block.h"
#include "packed/parallel.h"

namespace penstock {
namespace {

// Calls visit(block, its begin in the weight, its bytes) for every block, in threads.
template <typename Visit>
void for_each_block(int64_t raw_bytes, int32_t threads, Visit visit) {
  in_parallel((raw_bytes + kBlockRawBytes - 1) / kBlockRawBytes, threads, [&](int64_t block) {
    int64_t begin = block * kBlockRawBytes;
    visit(block, begin, std::min(kBlockRawBytes, raw_bytes - begin));
  });
}

bool are_values(int32_t kind, int64_t raw_bytes) {
  return is_packed_kind(kind) && raw_bytes >= 0 && raw_bytes % item_bytes((PackedKind)kind) == 0;
}

}  // namespace
}  // namespace penstock

using namespace penstock;

extern "C" {

// The room that pack_blocks needs for `raw_bytes`; -1: not a kind, or not whole values.
int64_t penstock_packed_most_bytes(int32_t kind, int64_t raw_bytes) {
  if (!are_values(kind, raw_bytes)) return -1;
  int64_t whole = raw_bytes / kBlockRawBytes, rest = raw_bytes % kBlockRawBytes;
  return whole * most_block_bytes((PackedKind)kind, kBlockRawBytes) +
         (rest ? most_block_bytes((PackedKind)kind, rest) : 0);
}

// Packs bytes of a weight, from the beginning of a block on. The packed blocks are written one behind the other, and
// the size of each goes to block_bytes. Returns their sum; -1 as above, or if `capacity` is less than the room needed.
int64_t penstock_pack_blocks(int32_t kind, const unsigned char* raw, int64_t raw_bytes, unsigned char* out,
                             int64_t capacity, int64_t* block_bytes, int32_t threads) {
  int64_t most = penstock_packed_most_bytes(kind, raw_bytes);
  if (most < 0 || capacity < most) return -1;
  int64_t end = 0;
  if (threads <= 1) {
    // Writes each block where the one before it ends, so nothing needs to be moved.
    for_each_block(raw_bytes, 1, [&](int64_t block, int64_t begin, int64_t bytes) {
      block_bytes[block] = pack_block((PackedKind)kind, raw + begin, bytes, out + end);
      end += block_bytes[block];
    });
    return end;
  }
  const int64_t stride = most_block_bytes((PackedKind)kind, kBlockRawBytes);
  for_each_block(raw_bytes, threads, [&](int64_t block, int64_t begin, int64_t bytes) {
    block_bytes[block] = pack_block((PackedKind)kind, raw + begin, bytes, out + block * stride);
  });
  for (int64_t block = 0; block * kBlockRawBytes < raw_bytes; ++block) {
    std::memmove(out + end, out + block * stride, (size_t)block_bytes[block]);
    end += block_bytes[block];
  }
  return end;
}

// The inverse. Returns 0; 1 if the sizes cannot be those of such blocks.
int32_t penstock_unpack_blocks(int32_t kind, const unsigned char* packed, int64_t packed_bytes,
                               const int64_t* block_bytes, int64_t raw_bytes, unsigned char* out, int32_t threads) {
  if (!are_values(kind, raw_bytes)) return 1;
  std::vector<int64_t> begins;
  int64_t end = 0;
  for (int64_t block = 0; block * kBlockRawBytes < raw_bytes; ++block) {
    int64_t bytes = std::min(kBlockRawBytes, raw_bytes - block * kBlockRawBytes);
    begins.push_back(end);
    if (block_bytes[block] < least_block_bytes((PackedKind)kind, bytes) || block_bytes[block] > packed_bytes - end)
      return 1;
    end += block_bytes[block];
  }
  for_each_block(raw_bytes, threads, [&](int64_t block, int64_t begin, int64_t bytes) {
    unpack_block((PackedKind)kind, packed + begins[(size_t)block], block_bytes[block], bytes, 0, bytes, out + begin);
  });
  return 0;
}

}  // extern "C"
