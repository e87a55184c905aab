// csrc/packed/decode.cu for the host: one warp, its lanes threads that meet at every vote and shuffle. For tests without a GPU.
#include <pthread.h>

#include <algorithm>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __grid_constant__
#define __shared__ static
#define __launch_bounds__(...)

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct Extent {
  unsigned x;
};

static constexpr unsigned kLanes = 32;
// The last warp of a block, whose shared memory has none behind it: what writes too far writes outside. Its tiles are
// those of the first all the same, by a block before the first one.
static constexpr unsigned kWarpsBefore = 256 / kLanes - 1;
static thread_local Extent threadIdx;
static const Extent blockIdx{0u - kWarpsBefore}, gridDim{1}, blockDim{kLanes};
static unsigned lane_here() { return threadIdx.x % kLanes; }
static pthread_barrier_t meeting;
static unsigned told[kLanes];

static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static unsigned min(unsigned one, unsigned other) { return std::min(one, other); }
static int __popc(unsigned bits) { return __builtin_popcount(bits); }
static int __ffs(unsigned bits) { return __builtin_ffs((int)bits); }

static unsigned __byte_perm(unsigned low, unsigned high, unsigned selectors) {
  const unsigned long long bytes = ((unsigned long long)high << 32) | low;
  unsigned picked = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned selector = (selectors >> (4 * i)) & 0xF;
    unsigned byte = (unsigned)(bytes >> (8 * (selector & 7))) & 0xFF;
    if (selector & 8) byte = byte & 0x80 ? 0xFF : 0;  // a GPU repeats the sign
    picked |= byte << (8 * i);
  }
  return picked;
}

static unsigned __funnelshift_r(unsigned low, unsigned high, unsigned bits) {
  return (unsigned)(((((unsigned long long)high) << 32) | low) >> (bits & 31));
}

// Calls look when every lane has told its value, and until then no lane tells another.
template <typename Look>
static auto among_lanes(unsigned value, Look look) {
  told[lane_here()] = value;
  pthread_barrier_wait(&meeting);
  auto seen = look();
  pthread_barrier_wait(&meeting);
  return seen;
}

static void __syncwarp() { pthread_barrier_wait(&meeting); }

static unsigned __ballot_sync(unsigned, bool is_so) {
  return among_lanes(is_so, [] {
    unsigned lanes = 0;
    for (unsigned lane = 0; lane < kLanes; ++lane) lanes |= told[lane] << lane;
    return lanes;
  });
}

static bool __any_sync(unsigned warp, bool is_so) { return __ballot_sync(warp, is_so) != 0; }

static unsigned __shfl_sync(unsigned, unsigned value, int from) {
  return among_lanes(value, [&] { return told[from]; });
}

static unsigned __shfl_up_sync(unsigned, unsigned value, int distance) {
  const int from = (int)lane_here() - distance;
  return among_lanes(value, [&] { return from < 0 ? value : told[from]; });
}

#include "packed/decode.cu"

extern "C" void decode_on_host(int kind, const DecodeParams* params) {
  void (*const kernels[])(DecodeParams) = {penstock_decode_bfloat16, penstock_decode_float32, penstock_decode_float16,
                                           penstock_decode_float8_e4m3, penstock_decode_float8_e5m2,
                                           penstock_decode_bfloat16_levels};
  pthread_barrier_init(&meeting, nullptr, kLanes);
  std::vector<std::thread> lanes;
  for (unsigned lane = 0; lane < kLanes; ++lane)
    lanes.emplace_back([&, lane] {
      threadIdx.x = kWarpsBefore * kLanes + lane;
      kernels[kind - 1](*params);
    });
  for (std::thread& lane : lanes) lane.join();
  pthread_barrier_destroy(&meeting);
}
