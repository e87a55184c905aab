// The instructions of Hopper and of GPUs that are newer, one small function each, and nothing else: the kernel is
// written against these names, so that the tests can run the same kernel text against an implementation in plain C++.
//
// Addresses of shared memory are 32-bit offsets in the shared window. Those of the own CTA are valid in the shared
// window of the cluster too; a peer's address is the own one, mapped to its rank.
#pragma once

#include "split_params.h"

#if MMA_SYNC
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 900
#error "split_linear on mma.sync needs sm_90 or newer: the copy engine and clusters are on no older target"
#endif
#elif !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "split_linear on wgmma needs sm_90a: wgmma and setmaxnreg exist on no other target"
#endif

#define DEVICE __device__ __forceinline__

namespace penstock {

struct Words4 {
  u32 word[4];
};

DEVICE u32 thread_index() { return threadIdx.x; }
// The same in all lanes, and known to be by the compiler: roles are branches that whole warps take.
DEVICE u32 warp_index() { return __shfl_sync(0xffffffff, threadIdx.x / 32, 0); }
DEVICE u32 lane_index() { return threadIdx.x % 32; }

DEVICE u32 cluster_index() {
  u32 index;
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(index));
  return index;
}

DEVICE u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Rounded up to 1024, the period of the 128-byte swizzle, which is a function of address bits 4 to 9. Every CTA of a
// launch rounds alike, so a slot has one offset in all of them, as multicast needs.
DEVICE u32 shared_base() {
  extern __shared__ unsigned char memory[];
  return ((u32)__cvta_generic_to_shared(memory) + 1023u) & ~1023u;
}

DEVICE void sync_warp() { __syncwarp(); }

// True in one lane of a warp that is together; the compiler knows it for one, and so issues copies without a loop over
// lanes.
DEVICE bool elected() {
  u32 one;
  asm volatile("{\n\t.reg .pred chosen;\n\telect.sync _|chosen, 0xffffffff;\n\tselp.u32 %0, 1, 0, chosen;\n\t}"
               : "=r"(one));
  return one != 0;
}

// A launch may begin before the one in front of it on its stream has ended, if it was launched so: behind this wait,
// all that the other wrote is seen. In any other launch it is no wait. The first says that the launch behind may begin.
DEVICE void allow_next_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void await_last_launch() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// All threads of all CTAs of the cluster. Release and acquire: what was written before is seen behind it, in peers too.
DEVICE void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
}

// The 128 threads of one warpgroup; barrier 0 is left to __syncthreads.
DEVICE void sync_warpgroup(u32 barrier) { asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory"); }

// Registers go from the warps that only issue copies to those that hold accumulators. Both need a launch bound, and a
// target of one architecture alone (sm_90a).
template <int kRegisters>
DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- mbarriers: 8 bytes of shared memory; a phase ends when `count` arrivals and all announced bytes are in.

DEVICE void init_barrier(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Makes the initialised barriers visible to the copy engine and, after sync_cluster, to peers.
DEVICE void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// One arrival of the own CTA, and `bytes` more to wait for. The bytes may come first: the count of bytes is signed, and
// the phase cannot end before this arrival.
DEVICE void arrive_expecting(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// One arrival on the barrier that lies at the same offset in the CTA of this rank. It orders reads of a slot before
// what the copy engine writes there next; nothing that was written is handed over. The default scope, a CTA's, costs
// nothing; a release at cluster scope costs a fence of all the GPU's memory per slot. To a peer the memory model
// promises less by it than is relied upon here: that what the tensor cores were given by then has been read.
DEVICE void arrive_at(u32 barrier, u32 rank) {
  asm volatile(
      "{\n\t.reg .b32 remote;\n\t"
      "mapa.shared::cluster.u32 remote, %0, %1;\n\t"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n\t}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// Whether the phase of this parity has ended. May suspend the thread for a while, hence the loop around it. The default
// scope for the same reason; an acquire at cluster scope would empty the L1 each time.
DEVICE bool try_wait(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n\t.reg .pred ended;\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\n\t"
      "selp.u32 %0, 1, 0, ended;\n\t}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// In a bounded build a wait that lasts longer than any right one says where it stands, and traps: a wrong count or
// parity ends as an error of this launch instead of a hang of the device.
DEVICE void wait(u32 barrier, u32 parity, u64 fault_address, u32 site) {
#if BOUNDED_WAITS
  // About five seconds at 1.7 GHz; the longest right wait is that of one launch, milliseconds.
  const long long limit_cycles = 1ll << 33;
  const long long begin = clock64();
  while (!try_wait(barrier, parity)) {
    if (clock64() - begin < limit_cycles) continue;
    if (fault_address) {
      volatile u32* words = reinterpret_cast<volatile u32*>(fault_address);
      words[1] = blockIdx.x, words[2] = threadIdx.x, words[3] = barrier, words[4] = parity;
      words[0] = site;
      __threadfence_system();
    }
    __trap();
  }
#else
  (void)fault_address, (void)site;
  while (!try_wait(barrier, parity)) {
  }
#endif
}

// ---- copies through a tensor map: a box into shared memory, its bytes reported to a barrier.

// Weights are read once: first to leave the L2. x is read by every CTA: last to leave.
DEVICE u64 policy_read_once() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
DEVICE u64 policy_keep() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// On 12.x a copy into the cluster's window takes a stack, and one into the CTA's own does not.
#if CLUSTERS
#define PENSTOCK_OWN_MEMORY "shared::cluster"
#else
#define PENSTOCK_OWN_MEMORY "shared::cta"
#endif

// Coordinates: column first (the dimension that is contiguous), then row. A box always counts in full towards the
// barrier, also where parts of it, or all of it, lie outside of the matrix and are filled with zeros.
DEVICE void copy_box(u32 to, const TensorMap* map, int column, int row, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d." PENSTOCK_OWN_MEMORY ".global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
      "l"(reinterpret_cast<u64>(map)), "r"(barrier), "r"(column), "r"(row), "l"(policy)
      : "memory");
}

// The same box into every CTA of the cluster whose bit is set, at the same offset; each one's own barrier hears of it.
DEVICE void copy_box_to(u32 peers, u32 to, const TensorMap* map, int column, int row, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
      " [%0], [%1, {%3, %4}], [%2], %5, %6;" ::"r"(to),
      "l"(reinterpret_cast<u64>(map)), "r"(barrier), "r"(column), "r"(row), "h"((unsigned short)peers), "l"(policy)
      : "memory");
}

// ---- matrix products of one warp.

// Matrix i of 8x8 lies in the 16-byte rows whose addresses lanes 8i to 8i+7 hold. Of each, lane l gets row l / 4,
// columns 2 * (l % 4) and the next.
DEVICE void load_matrices(u32 address, u32& a, u32& b) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "r"(address) : "memory");
}
DEVICE void load_matrices(u32 address, u32& a, u32& b, u32& c, u32& d) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
               : "r"(address)
               : "memory");
}

// 16 rows of A times 8 rows of B over 16 columns, added. A: rows 0-7 and rows 8-15 of columns 0-7, then of columns
// 8-15; B: columns 0-7, columns 8-15. Of the sums lane l holds rows l / 4 (d0, d1) and l / 4 + 8 (d2, d3), columns
// 2 * (l % 4) and the next.
DEVICE void multiply_16x8x16(float& d0, float& d1, float& d2, float& d3, const Words4& a, u32 b_low, u32 b_high) {
#if ELEMENT_BF16
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#else
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#endif
               " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
               : "r"(a.word[0]), "r"(a.word[1]), "r"(a.word[2]), "r"(a.word[3]), "r"(b_low), "r"(b_high));
}

// ---- the way out: accumulators, shared memory, global memory.

// Two numbers in one register, the first in the low half, rounded to nearest even. PTX names the high half first.
DEVICE u32 pack(float low, float high) {
  u32 packed;
#if ELEMENT_BF16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#endif
  return packed;
}

DEVICE float unpack(unsigned short bits) {
#if ELEMENT_BF16
  return __uint_as_float((u32)bits << 16);
#else
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
#endif
}

// Transposed: matrix i of 8x8 goes, column by column, to the 16-byte rows whose addresses lanes 8i to 8i+7 hold.
DEVICE void store_matrices(u32 address, u32 a, u32 b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b)
               : "memory");
}
DEVICE void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

DEVICE Words4 load_shared(u32 address) {
  Words4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "r"(address)
               : "memory");
  return v;
}

DEVICE void store_global(u64 address, const Words4& v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.word[0]), "r"(v.word[1]),
               "r"(v.word[2]), "r"(v.word[3])
               : "memory");
}

DEVICE unsigned short load_element(u64 address) { return *reinterpret_cast<const unsigned short*>(address); }
DEVICE void store_element(u64 address, unsigned short bits) { *reinterpret_cast<unsigned short*>(address) = bits; }
DEVICE void add_to(u64 address, u64 amount) { atomicAdd(reinterpret_cast<u64*>(address), amount); }

}  // namespace penstock
