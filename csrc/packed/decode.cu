// Decodes blocks of packed weights: one warp makes the 1,024 values of a tile. docs/format.md has the layout.
//
// Compiled beforehand to csrc/packed/decode_ptx.inc (bench/kernel_ptx.py), which the driver turns into code for the GPU at hand.
// Whatever the packed bytes are, nothing outside of them is read, and nothing is written but the values asked for: how many
// there are, and where blocks begin, the host says.
#include "packed/decode_params.h"

using penstock::DecodeParams;

constexpr unsigned kTileValues = 1024;
constexpr unsigned kNibbles = 0x11111111u;
constexpr unsigned kHeaderBytes = 16;
constexpr unsigned kUnitBytes = 16;
constexpr int kCodePlanes = 3;
constexpr unsigned kPlaneBytes = 128;
constexpr unsigned kWholeWarp = 0xFFFFFFFFu;

// One tile, as one lane of the warp sees it. Behind the planes of codes come those of the rests' highest bits.
template <int kRestPlanes>
struct Tile {
  const unsigned char* rests;
  const unsigned char* escapes;
  unsigned escapes_there;
  unsigned first_escape;
  uint2 table;
  unsigned planes[kCodePlanes + kRestPlanes];

  __device__ unsigned selectors(int round) const {
    return ((planes[0] >> round) & kNibbles) | (((planes[1] >> round) & kNibbles) << 1) |
           (((planes[2] >> round) & kNibbles) << 2);
  }
  // The same of the rests' bits: four for each of eight values.
  __device__ unsigned rest_nibbles(int round) const {
    unsigned nibbles = 0;
#pragma unroll
    for (int plane = 0; plane < kRestPlanes; ++plane)
      nibbles |= ((planes[kCodePlanes + plane] >> round) & kNibbles) << plane;
    return nibbles;
  }
  __device__ unsigned rest_bits(int bit) const {
    unsigned bits = 0;
#pragma unroll
    for (int plane = 0; plane < kRestPlanes; ++plane) bits |= ((planes[kCodePlanes + plane] >> bit) & 1u) << plane;
    return bits;
  }
  // Of the lane's values, in the order of bits.
  __device__ unsigned escaped() const { return ~(planes[0] | planes[1] | planes[2]); }
};

template <int kRestPlanes>
__device__ Tile<kRestPlanes> tile_at(const DecodeParams& params, unsigned tile, unsigned tiles_per_block,
                                     unsigned rest_bytes, int lane) {
  constexpr unsigned kTilePlanesBytes = (kCodePlanes + kRestPlanes) * kPlaneBytes;
  unsigned block = tile / tiles_per_block, in_block = tile % tiles_per_block;
  unsigned tiles = min(tiles_per_block, params.total_tiles - block * tiles_per_block);
  const unsigned char* packed = params.packed + (size_t)params.begins[block] * kUnitBytes;
  unsigned packed_bytes = (params.begins[block + 1] - params.begins[block]) * kUnitBytes;
  unsigned planes_at = (kHeaderBytes + tiles * 2 + kUnitBytes - 1) / kUnitBytes * kUnitBytes;
  unsigned rests_at = planes_at + tiles * kTilePlanesBytes;
  unsigned escapes_at = rests_at + tiles * kTileValues * rest_bytes;
  Tile<kRestPlanes> found;
  found.table = *reinterpret_cast<const uint2*>(packed);
  found.first_escape = *reinterpret_cast<const unsigned short*>(packed + kHeaderBytes + in_block * 2);
  const unsigned* planes = reinterpret_cast<const unsigned*>(packed + planes_at + in_block * kTilePlanesBytes);
#pragma unroll
  for (int plane = 0; plane < kCodePlanes + kRestPlanes; ++plane) found.planes[plane] = planes[plane * 32 + lane];
  found.rests = packed + rests_at + in_block * kTileValues * rest_bytes;
  found.escapes = packed + escapes_at;
  found.escapes_there = packed_bytes - escapes_at;
  return found;
}

// Calls put(index in the tile, bit of the lane's words, exponent) for every escape of this lane.
template <int kRestPlanes, typename Put>
__device__ void for_each_escape(const Tile<kRestPlanes>& tile, int lane, Put put) {
  unsigned bits = tile.escaped();
  if (!__any_sync(kWholeWarp, bits != 0)) return;
  unsigned count = __popc(bits), before = count;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    unsigned other = __shfl_up_sync(kWholeWarp, before, distance);
    if (lane >= distance) before += other;
  }
  unsigned at = tile.first_escape + before - count;
  for (; bits; bits &= bits - 1, ++at) {
    int bit = __ffs(bits) - 1;
    put((bit & 3) * 256 + lane * 8 + (bit >> 2), bit, at < tile.escapes_there ? tile.escapes[at] : 0u);
  }
}

__device__ unsigned two_bfloat16(unsigned exponents, unsigned rests) {
  return ((rests & 0x00800080u) << 8) | (exponents << 7) | (rests & 0x007F007Fu);
}

extern "C" __global__ void __launch_bounds__(256) penstock_decode_bfloat16(const __grid_constant__ DecodeParams params) {
  const int lane = threadIdx.x & 31;
  const unsigned warps = gridDim.x * blockDim.x / 32;
  unsigned short* out = reinterpret_cast<unsigned short*>(params.out);
  for (unsigned t = params.first_tile + (blockIdx.x * blockDim.x + threadIdx.x) / 32; t < params.end_tile; t += warps) {
    Tile<0> tile = tile_at<0>(params, t, 32, 1, lane);
    uint2 rests[4];
#pragma unroll
    for (int round = 0; round < 4; ++round)
      rests[round] = *reinterpret_cast<const uint2*>(tile.rests + round * 256 + lane * 8);
    const unsigned begin = t * kTileValues;
    const bool is_whole = begin >= params.begin_value && begin + kTileValues <= params.end_value;
#pragma unroll
    for (int round = 0; round < 4; ++round) {
      unsigned selectors = tile.selectors(round);
      unsigned low = __byte_perm(tile.table.x, tile.table.y, selectors);
      unsigned high = __byte_perm(tile.table.x, tile.table.y, selectors >> 16);
      uint4 made;
      made.x = two_bfloat16(__byte_perm(low, 0, 0x4140), __byte_perm(rests[round].x, 0, 0x4140));
      made.y = two_bfloat16(__byte_perm(low, 0, 0x4342), __byte_perm(rests[round].x, 0, 0x4342));
      made.z = two_bfloat16(__byte_perm(high, 0, 0x4140), __byte_perm(rests[round].y, 0, 0x4140));
      made.w = two_bfloat16(__byte_perm(high, 0, 0x4342), __byte_perm(rests[round].y, 0, 0x4342));
      unsigned at = begin + round * 256 + lane * 8;
      if (is_whole) {
        *reinterpret_cast<uint4*>(out + at) = made;
      } else {
        const unsigned pairs[4] = {made.x, made.y, made.z, made.w};
#pragma unroll
        for (int i = 0; i < 8; ++i)
          if (at + i >= params.begin_value && at + i < params.end_value)
            out[at + i] = (unsigned short)(pairs[i / 2] >> (16 * (i & 1)));
      }
    }
    for_each_escape(tile, lane, [&](unsigned index, int, unsigned exponent) {
      unsigned at = begin + index, rest = tile.rests[index];
      if (at >= params.begin_value && at < params.end_value)
        out[at] = (unsigned short)(((rest & 0x80u) << 8) | (exponent << 7) | (rest & 0x7Fu));
    });
  }
}

__device__ unsigned one_float32(unsigned exponent, unsigned low, unsigned middle, unsigned high) {
  return ((high & 0x80u) << 24) | (exponent << 23) | ((high & 0x7Fu) << 16) | (middle << 8) | low;
}

__device__ unsigned byte_of(uint2 eight, int i) { return ((i < 4 ? eight.x : eight.y) >> (8 * (i & 3))) & 0xFFu; }

extern "C" __global__ void __launch_bounds__(256) penstock_decode_float32(const __grid_constant__ DecodeParams params) {
  const int lane = threadIdx.x & 31;
  const unsigned warps = gridDim.x * blockDim.x / 32;
  unsigned* out = reinterpret_cast<unsigned*>(params.out);
  for (unsigned t = params.first_tile + (blockIdx.x * blockDim.x + threadIdx.x) / 32; t < params.end_tile; t += warps) {
    Tile<0> tile = tile_at<0>(params, t, 16, 3, lane);
    const unsigned begin = t * kTileValues;
    const bool is_whole = begin >= params.begin_value && begin + kTileValues <= params.end_value;
#pragma unroll
    for (int round = 0; round < 4; ++round) {
      const unsigned char* rests = tile.rests + round * 256 + lane * 8;
      uint2 low = *reinterpret_cast<const uint2*>(rests);
      uint2 middle = *reinterpret_cast<const uint2*>(rests + kTileValues);
      uint2 high = *reinterpret_cast<const uint2*>(rests + 2 * kTileValues);
      unsigned selectors = tile.selectors(round);
      uint2 exponents;
      exponents.x = __byte_perm(tile.table.x, tile.table.y, selectors);
      exponents.y = __byte_perm(tile.table.x, tile.table.y, selectors >> 16);
      unsigned made[8];
#pragma unroll
      for (int i = 0; i < 8; ++i)
        made[i] = one_float32(byte_of(exponents, i), byte_of(low, i), byte_of(middle, i), byte_of(high, i));
      unsigned at = begin + round * 256 + lane * 8;
      if (is_whole) {
        uint4* to = reinterpret_cast<uint4*>(out + at);
        to[0] = make_uint4(made[0], made[1], made[2], made[3]);
        to[1] = make_uint4(made[4], made[5], made[6], made[7]);
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i)
          if (at + i >= params.begin_value && at + i < params.end_value) out[at + i] = made[i];
      }
    }
    for_each_escape(tile, lane, [&](unsigned index, int, unsigned exponent) {
      unsigned at = begin + index;
      if (at >= params.begin_value && at < params.end_value)
        out[at] = one_float32(exponent, tile.rests[index], tile.rests[kTileValues + index],
                              tile.rests[2 * kTileValues + index]);
    });
  }
}

// The two nibbles are the sign and the mantissa's bits 8 and 9.
__device__ unsigned two_float16(unsigned exponents, unsigned rests, unsigned nibbles) {
  unsigned bits = (nibbles & 0x7u) | ((nibbles & 0x70u) << 12);
  return ((bits & 0x00040004u) << 13) | (exponents << 10) | ((bits & 0x00030003u) << 8) | rests;
}

extern "C" __global__ void __launch_bounds__(256) penstock_decode_float16(const __grid_constant__ DecodeParams params) {
  const int lane = threadIdx.x & 31;
  const unsigned warps = gridDim.x * blockDim.x / 32;
  unsigned short* out = reinterpret_cast<unsigned short*>(params.out);
  for (unsigned t = params.first_tile + (blockIdx.x * blockDim.x + threadIdx.x) / 32; t < params.end_tile; t += warps) {
    Tile<3> tile = tile_at<3>(params, t, 32, 1, lane);
    uint2 rests[4];
#pragma unroll
    for (int round = 0; round < 4; ++round)
      rests[round] = *reinterpret_cast<const uint2*>(tile.rests + round * 256 + lane * 8);
    const unsigned begin = t * kTileValues;
    const bool is_whole = begin >= params.begin_value && begin + kTileValues <= params.end_value;
#pragma unroll
    for (int round = 0; round < 4; ++round) {
      unsigned selectors = tile.selectors(round), nibbles = tile.rest_nibbles(round);
      unsigned low = __byte_perm(tile.table.x, tile.table.y, selectors);
      unsigned high = __byte_perm(tile.table.x, tile.table.y, selectors >> 16);
      uint4 made;
      made.x = two_float16(__byte_perm(low, 0, 0x4140), __byte_perm(rests[round].x, 0, 0x4140), nibbles);
      made.y = two_float16(__byte_perm(low, 0, 0x4342), __byte_perm(rests[round].x, 0, 0x4342), nibbles >> 8);
      made.z = two_float16(__byte_perm(high, 0, 0x4140), __byte_perm(rests[round].y, 0, 0x4140), nibbles >> 16);
      made.w = two_float16(__byte_perm(high, 0, 0x4342), __byte_perm(rests[round].y, 0, 0x4342), nibbles >> 24);
      unsigned at = begin + round * 256 + lane * 8;
      if (is_whole) {
        *reinterpret_cast<uint4*>(out + at) = made;
      } else {
        const unsigned pairs[4] = {made.x, made.y, made.z, made.w};
#pragma unroll
        for (int i = 0; i < 8; ++i)
          if (at + i >= params.begin_value && at + i < params.end_value)
            out[at + i] = (unsigned short)(pairs[i / 2] >> (16 * (i & 1)));
      }
    }
    for_each_escape(tile, lane, [&](unsigned index, int bit, unsigned exponent) {
      unsigned at = begin + index;
      if (at >= params.begin_value && at < params.end_value)
        out[at] = (unsigned short)two_float16(exponent, tile.rests[index], tile.rest_bits(bit));
    });
  }
}

// Sign and mantissa are bits alone, and a byte holds a value: four at a time.
template <int kExponentBits, int kMantissaBits>
__device__ unsigned four_float8(unsigned exponents, unsigned bits) {
  constexpr unsigned kSigns = 0x01010101u << kMantissaBits, kMantissas = kSigns - 0x01010101u;
  return ((bits & kSigns) << kExponentBits) | (exponents << kMantissaBits) | (bits & kMantissas);
}

template <int kExponentBits, int kMantissaBits>
__device__ void decode_float8(const DecodeParams& params) {
  const int lane = threadIdx.x & 31;
  const unsigned warps = gridDim.x * blockDim.x / 32;
  unsigned char* out = params.out;
  for (unsigned t = params.first_tile + (blockIdx.x * blockDim.x + threadIdx.x) / 32; t < params.end_tile; t += warps) {
    Tile<1 + kMantissaBits> tile = tile_at<1 + kMantissaBits>(params, t, 64, 0, lane);
    const unsigned begin = t * kTileValues;
    const bool is_whole = begin >= params.begin_value && begin + kTileValues <= params.end_value;
#pragma unroll
    for (int round = 0; round < 4; ++round) {
      unsigned selectors = tile.selectors(round), nibbles = tile.rest_nibbles(round);
      unsigned even = nibbles & 0x0F0F0F0Fu, odd = (nibbles >> 4) & 0x0F0F0F0Fu;
      uint2 made;
      made.x = four_float8<kExponentBits, kMantissaBits>(__byte_perm(tile.table.x, tile.table.y, selectors),
                                                         __byte_perm(even, odd, 0x5140));
      made.y = four_float8<kExponentBits, kMantissaBits>(__byte_perm(tile.table.x, tile.table.y, selectors >> 16),
                                                         __byte_perm(even, odd, 0x7362));
      unsigned at = begin + round * 256 + lane * 8;
      if (is_whole) {
        *reinterpret_cast<uint2*>(out + at) = made;
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i)
          if (at + i >= params.begin_value && at + i < params.end_value) out[at + i] = (unsigned char)byte_of(made, i);
      }
    }
    for_each_escape(tile, lane, [&](unsigned index, int bit, unsigned exponent) {
      unsigned at = begin + index;
      if (at >= params.begin_value && at < params.end_value)
        out[at] = (unsigned char)four_float8<kExponentBits, kMantissaBits>(exponent, tile.rest_bits(bit));
    });
  }
}

extern "C" __global__ void __launch_bounds__(256)
    penstock_decode_float8_e4m3(const __grid_constant__ DecodeParams params) {
  decode_float8<4, 3>(params);
}

extern "C" __global__ void __launch_bounds__(256)
    penstock_decode_float8_e5m2(const __grid_constant__ DecodeParams params) {
  decode_float8<5, 2>(params);
}

#include "packed/decode_levels.h"
