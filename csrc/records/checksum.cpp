// XXH3 after its specification (xxhash_spec.md of github.com/Cyan4973/xxHash), without vector instructions: what is
// hashed here is read only once, at load.
#include "records/checksum.h"

#include <cstring>

namespace penstock {
namespace {

constexpr unsigned char kSecret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d,
    0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0,
    0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0,
    0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b,
    0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac,
    0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51,
    0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34,
    0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49,
    0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8,
    0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b,
    0x40, 0x7e};

constexpr uint64_t kPrime32_1 = 0x9E3779B1, kPrime32_2 = 0x85EBCA77, kPrime32_3 = 0xC2B2AE3D;
constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87, kPrime2 = 0xC2B2AE3D27D4EB4F, kPrime3 = 0x165667B19E3779F9,
                   kPrime4 = 0x85EBCA77C2B2AE63, kPrime5 = 0x27D4EB2F165667C5;
constexpr uint64_t kMix1 = 0x165667919E3779F9, kMix2 = 0x9FB21C651E98DF25;

constexpr size_t kStripeBytes = 64, kStripesOfBlock = (sizeof kSecret - kStripeBytes) / 8;
constexpr size_t kBlockBytes = kStripeBytes * kStripesOfBlock;

template <typename Word>
Word word(const unsigned char* at) {
  Word found;
  std::memcpy(&found, at, sizeof found);
  return found;
}
uint64_t u64(const unsigned char* at) { return word<uint64_t>(at); }
uint64_t key(size_t at) { return u64(kSecret + at); }

uint64_t folded(uint64_t a, uint64_t b) {
  const auto product = (unsigned __int128)a * b;
  return (uint64_t)product ^ (uint64_t)(product >> 64);
}

uint64_t avalanche(uint64_t hash) {
  hash = (hash ^ (hash >> 37)) * kMix1;
  return hash ^ (hash >> 32);
}

uint64_t short_avalanche(uint64_t hash) {
  hash = (hash ^ (hash >> 33)) * kPrime2;
  hash = (hash ^ (hash >> 29)) * kPrime3;
  return hash ^ (hash >> 32);
}

uint64_t rotated(uint64_t value, int bits) { return (value << bits) | (value >> (64 - bits)); }

// Mixes sixteen bytes with the key at an offset in the secret.
uint64_t mixed(const unsigned char* at, size_t secret) { return folded(u64(at) ^ key(secret), u64(at + 8) ^ key(secret + 8)); }

uint64_t of_at_most_16(const unsigned char* at, size_t bytes) {
  if (bytes > 8) {
    const uint64_t low = u64(at) ^ key(24) ^ key(32), high = u64(at + bytes - 8) ^ key(40) ^ key(48);
    return avalanche(bytes + __builtin_bswap64(low) + high + folded(low, high));
  }
  if (bytes >= 4) {
    const uint64_t both = word<uint32_t>(at + bytes - 4) + ((uint64_t)word<uint32_t>(at) << 32);
    uint64_t hash = both ^ key(8) ^ key(16);
    hash = (hash ^ rotated(hash, 49) ^ rotated(hash, 24)) * kMix2;
    hash = (hash ^ ((hash >> 35) + bytes)) * kMix2;
    return hash ^ (hash >> 28);
  }
  if (!bytes) return short_avalanche(key(56) ^ key(64));
  const uint32_t all = ((uint32_t)at[0] << 16) | ((uint32_t)at[bytes >> 1] << 24) | at[bytes - 1] | (uint32_t)(bytes << 8);
  return short_avalanche(all ^ word<uint32_t>(kSecret) ^ word<uint32_t>(kSecret + 4));
}

uint64_t of_at_most_240(const unsigned char* at, size_t bytes) {
  uint64_t hash = bytes * kPrime1;
  if (bytes <= 128) {
    for (size_t pair = (bytes - 1) / 32 + 1; pair > 0; --pair)
      hash += mixed(at + 16 * (pair - 1), 32 * (pair - 1)) + mixed(at + bytes - 16 * pair, 32 * (pair - 1) + 16);
    return avalanche(hash);
  }
  for (size_t i = 0; i < 8; ++i) hash += mixed(at + 16 * i, 16 * i);
  hash = avalanche(hash);
  for (size_t i = 8; i < bytes / 16; ++i) hash += mixed(at + 16 * i, 16 * (i - 8) + 3);
  return avalanche(hash + mixed(at + bytes - 16, 136 - 17));
}

void accumulate(uint64_t* sums, const unsigned char* at, size_t secret) {
  for (size_t i = 0; i < 8; ++i) {
    const uint64_t value = u64(at + 8 * i), keyed = value ^ key(secret + 8 * i);
    sums[i ^ 1] += value;
    sums[i] += (keyed & 0xFFFFFFFF) * (keyed >> 32);
  }
}

uint64_t of_many(const unsigned char* at, size_t bytes) {
  uint64_t sums[8] = {kPrime32_3, kPrime1, kPrime2, kPrime3, kPrime4, kPrime32_2, kPrime5, kPrime32_1};
  const unsigned char* const last = at + bytes - kStripeBytes;
  for (size_t left = bytes; left > kStripeBytes;) {
    size_t stripe = 0;
    for (; stripe < kStripesOfBlock && left > kStripeBytes; ++stripe, at += kStripeBytes, left -= kStripeBytes)
      accumulate(sums, at, 8 * stripe);
    if (stripe < kStripesOfBlock) break;
    for (size_t i = 0; i < 8; ++i)
      sums[i] = (sums[i] ^ (sums[i] >> 47) ^ key(sizeof kSecret - kStripeBytes + 8 * i)) * kPrime32_1;
  }
  accumulate(sums, last, sizeof kSecret - kStripeBytes - 7);
  uint64_t hash = bytes * kPrime1;
  for (size_t i = 0; i < 4; ++i) hash += folded(sums[2 * i] ^ key(11 + 16 * i), sums[2 * i + 1] ^ key(19 + 16 * i));
  return avalanche(hash);
}

}  // namespace

uint64_t checksum(const void* data, size_t bytes) {
  const auto* at = static_cast<const unsigned char*>(data);
  return bytes <= 16 ? of_at_most_16(at, bytes) : bytes <= 240 ? of_at_most_240(at, bytes) : of_many(at, bytes);
}

}  // namespace penstock

extern "C" uint64_t penstock_checksum(const void* data, int64_t bytes) {
  return penstock::checksum(data, (size_t)bytes);
}
