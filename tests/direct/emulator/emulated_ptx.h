// The instructions of src/penstock/direct/kernels/ptx.h and wgmma.h under the same names, in plain C++, for one cluster
// at a time. mma_sync.h is written against those of ptx.h, and its own text runs.
// What the documentation fixes is acted out as it is documented: the swizzle, descriptors, fragments, transaction
// counts, phases, multicast to equal offsets. Memory ordering is not modelled.
#pragma once

#include "split_params.h"

#define DEVICE inline

namespace penstock {

struct Words4 {
  u32 word[4];
};

u32 thread_index();
u32 warp_index();
u32 lane_index();
u32 cluster_index();
u32 cluster_rank();
u32 shared_base();
void sync_warp();
bool elected();
void sync_cluster();
void sync_warpgroup(u32 barrier);
void init_barrier(u32 barrier, u32 count);
void fence_barrier_init();
void arrive_expecting(u32 barrier, u32 bytes);
void arrive_at(u32 barrier, u32 rank);
void wait(u32 barrier, u32 parity, u64, u32 site);
u64 policy_read_once();
u64 policy_keep();
void copy_box_to(u32 peers, u32 to, const TensorMap* map, int column, int row, u32 barrier, u64);
void copy_box(u32 to, const TensorMap* map, int column, int row, u32 barrier, u64 policy);
u32 pack(float low, float high);
float unpack(unsigned short bits);
void load_matrices(u32 address, u32& a, u32& b);
void load_matrices(u32 address, u32& a, u32& b, u32& c, u32& d);
void multiply_16x8x16(float& d0, float& d1, float& d2, float& d3, const Words4& a, u32 b_low, u32 b_high);
void store_matrices(u32 address, u32 a, u32 b);
void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d);
Words4 load_shared(u32 address);
void store_global(u64 address, const Words4& v);
unsigned short load_element(u64 address);
void store_element(u64 address, unsigned short bits);
void add_to(u64 address, u64 amount);

// Launches are acted out one after the other.
inline void allow_next_launch() {}
inline void await_last_launch() {}

template <int>
inline void give_registers() {}
template <int>
inline void take_registers() {}

#if !MMA_SYNC
void fence_products();
void commit_products();
void await_products(int pending);
template <int kPending>
inline void await_products() {
  await_products(kPending);
}
void multiply(float* sums, u32 count, u64 a, u64 b, u32 add);
inline void multiply(float (&d)[TILE_TOKENS / 2], u64 a, u64 b, u32 add) { multiply(d, TILE_TOKENS / 2, a, b, add); }
void settle_products();
inline void settle_products(float (&)[TILE_TOKENS / 2]) { settle_products(); }
#endif

}  // namespace penstock
