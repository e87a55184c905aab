// Decodes the code of three levels: two bits for the three most frequent exponents of a block, three more for the next
// seven, a byte for any other. decode.cu includes this, and says what holds for all kernels.
//
// All reads of a tile are on their way at once: what must be known before others are is read one tile ahead.
#pragma once

#include "packed/decode_params.h"

namespace levels {

using penstock::DecodeParams;

constexpr unsigned kBlockTiles = 32;
constexpr unsigned kThreads = 256;
// On a multiprocessor: for more, the compiler would put registers into memory.
constexpr unsigned kBlocksTogether = 4;
constexpr unsigned kTilePlanesBytes = 256;
constexpr unsigned kGroupBytes = 12;  // 32 codes of the second level: three planes of a word
// A tile's codes of the second level begin anywhere in a group.
constexpr unsigned kMostOctets = kTileValues / 8 + 1;
constexpr unsigned kEscapesAhead = 32;
// Four values' exponents are read as two aligned words, so up to eight bytes beyond the last one's.
constexpr unsigned kExponentBytes = kMostOctets * 8 + 8;

// One tile, as one lane of the warp sees it.
struct Tile {
  unsigned first_table;  // the bytes 1 to 3
  uint2 second_table;    // the bytes 1 to 7
  unsigned planes[2];
  uint2 rests[4];
  const unsigned* groups;
  unsigned groups_there;
  unsigned first_code;  // in the groups; end_code is the next tile's
  unsigned end_code;
  const unsigned char* escapes;
  unsigned escapes_there;
  unsigned first_escape;
};

// Where a block lies, and the parts of it.
struct Place {
  const unsigned char* packed;
  unsigned packed_bytes;
  unsigned in_block;
  unsigned tiles;
};

__device__ Place place_of(const DecodeParams& params, unsigned tile) {
  const unsigned block = tile / kBlockTiles;
  Place place;
  place.packed = params.packed + (size_t)params.begins[block] * kUnitBytes;
  place.packed_bytes = (params.begins[block + 1] - params.begins[block]) * kUnitBytes;
  place.in_block = tile % kBlockTiles;
  place.tiles = min(kBlockTiles, params.total_tiles - block * kBlockTiles);
  return place;
}

__device__ unsigned padded(unsigned bytes) { return (bytes + kUnitBytes - 1) / kUnitBytes * kUnitBytes; }

// What must be known before a tile's codes of the second level can be read. So it is read one tile ahead.
struct Starts {
  unsigned here;
  unsigned next;
  unsigned groups;
};

__device__ Starts starts_of(const DecodeParams& params, unsigned tile) {
  Starts starts = {0, 0, 0};
  if (tile >= params.end_tile) return starts;
  const Place place = place_of(params, tile);
  const unsigned* words = reinterpret_cast<const unsigned*>(place.packed);
  starts.here = words[kHeaderBytes / 4 + place.in_block];
  starts.next = words[kHeaderBytes / 4 + place.in_block + 1];
  starts.groups = words[1];
  return starts;
}

__device__ Tile tile_at(const DecodeParams& params, unsigned tile, const Starts& starts, int lane) {
  const Place place = place_of(params, tile);
  const unsigned planes_at = padded(kHeaderBytes + (place.tiles + 1) * 4);
  const unsigned rests_at = planes_at + place.tiles * kTilePlanesBytes;
  const unsigned groups_at = rests_at + place.tiles * kTileValues;
  Tile found;
  const unsigned* planes =
      reinterpret_cast<const unsigned*>(place.packed + planes_at + place.in_block * kTilePlanesBytes);
#pragma unroll
  for (int plane = 0; plane < 2; ++plane) found.planes[plane] = planes[plane * 32 + lane];
  const uint4 header = *reinterpret_cast<const uint4*>(place.packed);
  found.first_table = header.x;
  found.second_table.x = header.z;
  found.second_table.y = header.w;
  const unsigned char* rests = place.packed + rests_at + place.in_block * kTileValues;
#pragma unroll
  for (int round = 0; round < 4; ++round)
    found.rests[round] = *reinterpret_cast<const uint2*>(rests + round * 256 + lane * 8);
  found.groups = reinterpret_cast<const unsigned*>(place.packed + groups_at);
  found.groups_there = min(starts.groups, (place.packed_bytes - groups_at) / kGroupBytes);
  found.first_code = starts.here & 0xFFFFu;
  found.end_code = starts.next & 0xFFFFu;
  const unsigned escapes_at = groups_at + found.groups_there * kGroupBytes;
  found.escapes = place.packed + escapes_at;
  found.escapes_there = place.packed_bytes - escapes_at;
  found.first_escape = starts.here >> 16;
  return found;
}

__device__ unsigned up_to_here(unsigned count, int lane) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    unsigned other = __shfl_up_sync(kWholeWarp, count, distance);
    if (lane >= distance) count += other;
  }
  return count;
}

// Bytes twice, so that a sign is where it belongs and a mantissa, too.
__device__ unsigned two_bfloat16(unsigned exponents, unsigned rests_twice) {
  return (rests_twice & 0x807F807Fu) | (exponents << 7);
}

__device__ uint4 eight_bfloat16(unsigned low, unsigned high, uint2 rests) {
  uint4 made;
  made.x = two_bfloat16(__byte_perm(low, 0, 0x4140), __byte_perm(rests.x, 0, 0x1100));
  made.y = two_bfloat16(__byte_perm(low, 0, 0x4342), __byte_perm(rests.x, 0, 0x3322));
  made.z = two_bfloat16(__byte_perm(high, 0, 0x4140), __byte_perm(rests.y, 0, 0x1100));
  made.w = two_bfloat16(__byte_perm(high, 0, 0x4342), __byte_perm(rests.y, 0, 0x3322));
  return made;
}

__device__ void write_eight(const DecodeParams& params, unsigned at, bool is_whole, uint4 made) {
  unsigned short* out = reinterpret_cast<unsigned short*>(params.out);
  if (is_whole) {
    *reinterpret_cast<uint4*>(out + at) = made;
    return;
  }
  const unsigned pairs[4] = {made.x, made.y, made.z, made.w};
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (at + i >= params.begin_value && at + i < params.end_value)
      out[at + i] = (unsigned short)(pairs[i / 2] >> (16 * (i & 1)));
}

__device__ bool is_whole_tile(const DecodeParams& params, unsigned begin) {
  return begin >= params.begin_value && begin + kTileValues <= params.end_value;
}

// What a warp keeps in shared memory: the exponents of its tile's second level, and the escapes that come first.
struct alignas(8) Exponents {
  unsigned char bytes[kExponentBytes];
  unsigned char escapes[kEscapesAhead];
};

// Of the escapes' exponents, those of one octet: into the bytes that are there already. Returns how many escapes the
// whole warp had.
__device__ unsigned put_escapes(const Tile& tile, Exponents& exponents, unsigned octet, unsigned escaped,
                                unsigned escapes_before, int lane) {
  const unsigned lanes = __ballot_sync(kWholeWarp, escaped != 0);
  if (lanes == 0) return 0;
  unsigned before, all;
  if (__any_sync(kWholeWarp, (escaped & (escaped - 1)) != 0)) {
    const unsigned count = __popc(escaped), until = up_to_here(count, lane);
    before = until - count;
    all = __shfl_sync(kWholeWarp, until, 31);
  } else {
    before = __popc(lanes & ((1u << lane) - 1));
    all = __popc(lanes);
  }
  for (unsigned number = escapes_before + before; escaped; escaped &= escaped - 1, ++number) {
    const unsigned at = tile.first_escape + number;
    unsigned char exponent = 0;
    if (number < kEscapesAhead) exponent = exponents.escapes[number];
    else if (at < tile.escapes_there) exponent = tile.escapes[at];
    exponents.bytes[octet * 8 + (__ffs(escaped) - 1) / 4] = exponent;
  }
  return all;
}

// The group of eight codes of the second level, as it lies there: nothing waits for it before it is needed.
struct Group {
  unsigned planes[3];
};

__device__ Group group_of(const Tile& tile, unsigned octet) {
  const unsigned number = octet / 4;
  const bool is_there = octet * 8 < tile.end_code && number < tile.groups_there;
  Group found;
#pragma unroll
  for (int plane = 0; plane < 3; ++plane) found.planes[plane] = is_there ? tile.groups[number * 3 + plane] : 0u;
  return found;
}

struct Octet {
  unsigned selectors;  // of bytes of the second table
  unsigned escaped;    // a bit in each nibble
};

__device__ Octet octet_of(const Tile& tile, const Group& group, unsigned octet) {
  const unsigned first = octet * 8;
  unsigned codes[3];
#pragma unroll
  for (int plane = 0; plane < 3; ++plane) codes[plane] = (group.planes[plane] >> (octet % 4)) & kNibbles;
  Octet made;
  made.selectors = codes[0] | (codes[1] << 1) | (codes[2] << 2);
  made.escaped = ~(codes[0] | codes[1] | codes[2]) & kNibbles;
  // Codes of the tiles before and behind are not this one's.
  if (first < tile.first_code) made.escaped &= ~0u << (4 * (tile.first_code - first));
  if (first >= tile.end_code) made.escaped = 0;
  else if (tile.end_code - first < 8) made.escaped &= ~0u >> (4 * (first + 8 - tile.end_code));
  return made;
}

}  // namespace levels

// The second level first: each lane turns eight codes after another into bytes, none of them in vain. Then four values
// take theirs with one byte permutation, out of the first table and of the next four bytes, by their ranks.
extern "C" __global__ void __launch_bounds__(levels::kThreads, levels::kBlocksTogether)
    penstock_decode_bfloat16_levels(const __grid_constant__ DecodeParams params) {
  using namespace levels;
  __shared__ Exponents of_warps[kThreads / 32];
  const int lane = threadIdx.x & 31;
  Exponents& exponents = of_warps[threadIdx.x / 32];
  const unsigned warps = gridDim.x * blockDim.x / 32;
  unsigned t = params.first_tile + (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  Starts coming = starts_of(params, t);
  for (; t < params.end_tile; t += warps) {
    const levels::Tile tile = levels::tile_at(params, t, coming, lane);
    coming = starts_of(params, t + warps);
    const unsigned first_octet = tile.first_code / 8;
    const unsigned octets = min((tile.end_code + 7) / 8 - first_octet, kMostOctets);
    // Most tiles have between 32 and 64 of them. These are on their way while the values are counted.
    Group group = group_of(tile, first_octet + lane), next_group = group_of(tile, first_octet + 32 + lane);
    const unsigned ahead = tile.first_escape + lane;
    const unsigned char escape = ahead < tile.escapes_there ? tile.escapes[ahead] : (unsigned char)0;
    // How many of a lane's eight values go on to the second level, a byte for each round. All lanes before the last
    // have at most 248 in a round, which a byte holds; the sum with the last is wrong at most there, and not looked at.
    unsigned counts = 0;
#pragma unroll
    for (int round = 0; round < 4; ++round) {
      const unsigned goes_on = ~((tile.planes[0] | tile.planes[1]) >> round) & kNibbles;
      counts |= ((goes_on * kNibbles) >> 28) << (8 * round);
    }
    const unsigned before = up_to_here(counts, lane) - counts;
    const unsigned last_before = __shfl_sync(kWholeWarp, before, 31), last = __shfl_sync(kWholeWarp, counts, 31);

    unsigned escapes_before = 0;
    exponents.escapes[lane] = escape;
    __syncwarp();
    for (unsigned begin = 0; begin < octets; begin += 32) {
      Octet octet = octet_of(tile, group, first_octet + begin + lane);
      if (begin + lane < octets) {
        uint2 eight;
        eight.x = __byte_perm(tile.second_table.x, tile.second_table.y, octet.selectors);
        eight.y = __byte_perm(tile.second_table.x, tile.second_table.y, octet.selectors >> 16);
        *reinterpret_cast<uint2*>(exponents.bytes + (begin + lane) * 8) = eight;
      } else {
        octet.escaped = 0;  // a damaged block may say that its tile has more codes than there is room for
      }
      escapes_before += put_escapes(tile, exponents, begin + lane, octet.escaped, escapes_before, lane);
      group = next_group;
      if (begin + 64 < octets) next_group = group_of(tile, first_octet + begin + 64 + lane);
    }
    __syncwarp();

    const unsigned begin = t * kTileValues;
    const bool is_whole = is_whole_tile(params, begin);
    unsigned of_round = tile.first_code % 8;
#pragma unroll
    for (int round = 0; round < 4; ++round) {
      const unsigned low_bits = (tile.planes[0] >> round) & kNibbles, high_bits = (tile.planes[1] >> round) & kNibbles;
      const unsigned goes_on = ~(low_bits | high_bits) & kNibbles;
      // In each nibble, how many go on up to its value.
      const unsigned until = goes_on * kNibbles;
      const unsigned low_count = (until >> 12) & 0xFu;
      // Before it, and of the upper four values without those of the lower.
      const unsigned ranks = until - goes_on - low_count * 0x11110000u;
      const unsigned selectors = (low_bits + 2 * high_bits) | ((ranks | 0x44444444u) & (goes_on * 7));
      const unsigned at = of_round + ((before >> (8 * round)) & 0xFFu), upper_at = at + low_count;
      const unsigned* words = reinterpret_cast<const unsigned*>(exponents.bytes);
      const unsigned lower = __funnelshift_r(words[at / 4], words[at / 4 + 1], at * 8);
      const unsigned upper = __funnelshift_r(words[upper_at / 4], words[upper_at / 4 + 1], upper_at * 8);
      const uint4 made = eight_bfloat16(__byte_perm(tile.first_table, lower, selectors),
                                        __byte_perm(tile.first_table, upper, selectors >> 16), tile.rests[round]);
      write_eight(params, begin + round * 256 + lane * 8, is_whole, made);
      of_round += ((last_before >> (8 * round)) & 0xFFu) + ((last >> (8 * round)) & 0xFFu);
    }
    __syncwarp();
  }
}
