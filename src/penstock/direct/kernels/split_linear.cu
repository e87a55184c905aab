// y[T, N] = x[T, K] @ W[N, K]^T + bias, where the first rows of W lie in HBM and the others in the host's memory, in
// one launch. Rows of W are the M of the tensor cores' product and tokens its N, because W has many rows whatever T is.
//
// One CTA: a tile of 64 or 128 rows of W (one warpgroup of consumers for each 64) times TILE_TOKENS tokens, K taken in
// chunks of 64 columns, always in the same order and by the same instructions: where a row comes from changes no bit.
// One warp copies W, another copies x, each through a ring of slots in shared memory with rings of their own length,
// because what hides the host's latency is bytes of W in flight, and x comes from the L2.
//
// One cluster: token_ctas x row_ctas CTAs. CTAs with the same rows and other tokens share the tile of W: each copies a
// slice of it to all of them, so a host row crosses the link once however many tokens there are. CTAs with the same
// tokens and other rows share the tile of x in the same way.
//
// Launched to overlap with the launch in front of it, W is copied ahead: weights are not what a launch writes. x, the
// bias and y wait for that launch to end.
//
// Barriers, for each slot of either ring, in every CTA:
//   full   1 arrival: the own producer's, which announces the bytes of the whole tile, own slice and peers' slices.
//   empty  (sharing CTAs) x (consumer warps) arrivals: a producer writes into all sharing CTAs, so it waits until the
//          consumers of all of them are done with the slot.
// A peer's bytes cannot run ahead of a phase: it copies into a slot only after all consumers, those of this CTA too,
// have released it, and they release what they have seen full.
//
// Matrix products are Hopper's own (wgmma.h, sm_90a), or those that newer GPUs have too (mma_sync.h): one interface,
// and the rest is plain sm_90. On GPUs newer than Hopper it was compiled for and has not run; see self_check.py.
//
// Compiled with: TILE_TOKENS, TILE_WARPGROUPS (1 or 2), ELEMENT_BF16 (0: fp16), BOUNDED_WAITS, MMA_SYNC (0: wgmma),
// CLUSTERS (0: every CTA is alone).
#if defined(PENSTOCK_EMULATED)
#include "emulated_ptx.h"
#else
#include "ptx.h"
#endif
#if MMA_SYNC
#include "mma_sync.h"
#elif !defined(PENSTOCK_EMULATED)
#include "wgmma.h"
#endif
#include "descriptor.h"
#include "split_params.h"
#include "split_schedule.h"

namespace penstock {

constexpr int kTileRows = 64 * TILE_WARPGROUPS;
constexpr u32 kRowBytes = kChunk * 2;
constexpr u32 kWSlotBytes = kTileRows * kRowBytes;
constexpr u32 kXSlotBytes = TILE_TOKENS * kRowBytes;
constexpr u32 kConsumerWarps = 4 * TILE_WARPGROUPS;
constexpr int kThreads = 128 + 128 * TILE_WARPGROUPS;
// The results leave through shared memory, this many tokens at a time, rows of 64 results and 16 bytes: with a stride
// of 144 bytes neither the transposed stores nor the 16-byte loads meet in a bank.
constexpr int kOutTokens = TILE_TOKENS < 32 ? TILE_TOKENS : 32;
constexpr u32 kOutStride = 64 * 2 + 16;
constexpr u32 kOutBytes = kOutTokens * kOutStride;
// With 128 accumulators and two consumer warpgroups the even share of 168 registers would not do: 65536 registers are
// 512 for each lane of the three warpgroups together, in steps of 8: 40 + 2 * 232 = 504.
constexpr bool kMoveRegisters = TILE_TOKENS >= 192 && !MMA_SYNC;

// What a bounded wait reports, mirrored in src/penstock/direct/faults.py.
constexpr u32 kSiteWEmpty = 1, kSiteXEmpty = 2, kSiteWFull = 3, kSiteXFull = 4;

struct Place {
  u32 w, x, out;                                  // rings and staging
  u32 w_full, w_empty, x_full, x_empty;           // 8 bytes for each slot
  int w_stages, x_stages;
  int cluster;
  int token_rank, row_rank;                       // of this CTA in its cluster
};

DEVICE Place find_place(const SplitParams& p) {
  Place at;
  at.cluster = (int)cluster_index();
  const int rank = (int)cluster_rank();
  at.token_rank = rank % p.token_ctas;
  at.row_rank = rank / p.token_ctas;
  // A host-facing cluster leaves the last slots unused; the others do not move, so the layout is one for all.
  at.w_stages = at.cluster < p.schedule.host_clusters ? p.host_w_stages : p.w_stages;
  at.x_stages = p.x_stages;
  at.w = shared_base();
  at.x = at.w + p.w_stages * kWSlotBytes;
  at.out = at.x + p.x_stages * kXSlotBytes;
  at.w_full = at.out + TILE_WARPGROUPS * kOutBytes;
  at.w_empty = at.w_full + 8 * p.w_stages;
  at.x_full = at.w_empty + 8 * p.w_stages;
  at.x_empty = at.x_full + 8 * p.x_stages;
  return at;
}

// The slot that is next, and the parity of its phase. A fresh barrier is in phase 0, and "the phase before", parity 1,
// counts as ended: so producers, who wait for the other parity, pass their first round.
struct Cursor {
  int slot = 0;
  u32 parity = 0;
  DEVICE void advance(int stages) {
    if (++slot == stages) slot = 0, parity ^= 1;
  }
};

DEVICE void copy_rows(u32 peers, bool shared, u32 to, const TensorMap* map, int column, int row, u32 barrier,
                      u64 policy) {
#if CLUSTERS
  if (shared) return copy_box_to(peers, to, map, column, row, barrier, policy);
#else
  (void)peers, (void)shared;
#endif
  copy_box(to, map, column, row, barrier, policy);
}

// One thread. Copies this CTA's slice of each tile of W, from whichever side its rows lie on, to all that share it.
DEVICE void produce_w(const SplitParams& p, const Place& at) {
  const int slice_rows = kTileRows / p.token_ctas;
  const u32 slice_offset = (u32)(at.token_rank * slice_rows) * kRowBytes;
  // Sharing CTAs have consecutive ranks.
  const u32 peers = ((1u << p.token_ctas) - 1) << (at.row_rank * p.token_ctas);
  const bool shared = p.token_ctas > 1;
  const u64 policy = policy_read_once();
  const int split_row = p.schedule.split_row;
  u64 host_bytes = 0;
  Cursor cursor;
  for (int step = 0;; ++step) {
    const SplitItem item = split_item(p.schedule, at.cluster, step);
    if (item.band < 0) break;
    const int row = item.band * p.schedule.cluster_rows + at.row_rank * kTileRows + at.token_rank * slice_rows;
    for (int column = 0; column < p.depth; column += kChunk) {
      const u32 full = at.w_full + 8 * cursor.slot;
      const u32 to = at.w + cursor.slot * kWSlotBytes + slice_offset;
      wait(at.w_empty + 8 * cursor.slot, cursor.parity ^ 1, p.fault_address, kSiteWEmpty);
      arrive_expecting(full, kWSlotBytes);
      if (row + slice_rows <= split_row) {
        copy_rows(peers, shared, to, &p.prefix, column, row, full, policy);
      } else if (row >= split_row) {
        copy_rows(peers, shared, to, &p.rest, column, row - split_row, full, policy);
      } else {
        for (int part = 0; part < slice_rows; part += kGrain) {
          const bool host = row + part >= split_row;
          copy_rows(peers, shared, to + part * kRowBytes, host ? &p.rest_16 : &p.prefix_16, column,
                    host ? row + part - split_row : row + part, full, policy);
        }
      }
      host_bytes += split_host_bytes(p.schedule, p.depth, row, slice_rows, column);
      cursor.advance(at.w_stages);
    }
  }
  if (p.host_bytes_address && host_bytes) add_to(p.host_bytes_address, host_bytes);
}

// One thread. The same for x, whose tile is shared by the CTAs of the same token rank.
DEVICE void produce_x(const SplitParams& p, const Place& at) {
  const int slice_tokens = TILE_TOKENS / p.row_ctas;
  const u32 slice_offset = (u32)(at.row_rank * slice_tokens) * kRowBytes;
  u32 peers = 0;
  for (int i = 0; i < p.row_ctas; ++i) peers |= 1u << (i * p.token_ctas + at.token_rank);
  const bool shared = p.row_ctas > 1;
  const u64 policy = policy_keep();
  await_last_launch();
  Cursor cursor;
  for (int step = 0;; ++step) {
    const SplitItem item = split_item(p.schedule, at.cluster, step);
    if (item.band < 0) break;
    const int token = (item.token_block * p.token_ctas + at.token_rank) * TILE_TOKENS + at.row_rank * slice_tokens;
    for (int column = 0; column < p.depth; column += kChunk) {
      const u32 full = at.x_full + 8 * cursor.slot;
      wait(at.x_empty + 8 * cursor.slot, cursor.parity ^ 1, p.fault_address, kSiteXEmpty);
      arrive_expecting(full, kXSlotBytes);
      copy_rows(peers, shared, at.x + cursor.slot * kXSlotBytes + slice_offset, &p.x, column, token, full, policy);
      cursor.advance(at.x_stages);
    }
  }
}

// A warp has seen the product complete that read these slots: one lane tells each CTA that writes into them.
DEVICE void release(const SplitParams& p, const Place& at, int w_slot, int x_slot) {
  const int lane = (int)lane_index();
  if (lane < p.token_ctas) arrive_at(at.w_empty + 8 * w_slot, (u32)(at.row_rank * p.token_ctas + lane));
  if (lane < p.row_ctas) arrive_at(at.x_empty + 8 * x_slot, (u32)(lane * p.token_ctas + at.token_rank));
}

// 64 rows x TILE_TOKENS results of one warpgroup: bias, rounding, and out through shared memory, so that the 64 results
// of a token, which lie together in y, are written by neighbouring threads.
DEVICE void write_out(const SplitParams& p, const Place& at, int warpgroup, int row, int token,
                      const float (&d)[TILE_TOKENS / 2]) {
  const int thread = (int)thread_index() % 128;
  const int warp = thread / 32;
  const int lane = (int)lane_index();
  const u32 out = at.out + warpgroup * kOutBytes;
  const int row_low = row + 16 * warp + lane / 4;
  float bias_low = 0, bias_high = 0;
  if (p.bias_address) {
    if (row_low < p.schedule.rows) bias_low = unpack(load_element(p.bias_address + 2ull * row_low));
    if (row_low + 8 < p.schedule.rows) bias_high = unpack(load_element(p.bias_address + 2ull * (row_low + 8)));
  }
  // Matrices of 8x8 in the order (rows 0-7, rows 8-15) of one block of 8 tokens, then the same of the next block: lanes
  // 8i to 8i+7 hold the addresses of matrix i's eight tokens.
  const u32 matrix = out + ((lane / 16) * 8 + lane % 8) * kOutStride + (16 * warp + (lane / 8) % 2 * 8) * 2;
  // 16-byte stores where every row of y starts at a multiple of 16 bytes.
  const bool wide = p.y_stride % 8 == 0 && p.y_address % 16 == 0;
#pragma unroll
  for (int base = 0; base < TILE_TOKENS; base += kOutTokens) {
    sync_warpgroup(1 + warpgroup);  // the loads of the round before are done
#if TILE_TOKENS == 8
    store_matrices(matrix, pack(d[0] + bias_low, d[1] + bias_low), pack(d[2] + bias_high, d[3] + bias_high));
#else
#pragma unroll
    for (int block = 0; block < kOutTokens; block += 16) {
      const int i = (base + block) / 2;
      store_matrices(matrix + block * kOutStride, pack(d[i] + bias_low, d[i + 1] + bias_low),
                     pack(d[i + 2] + bias_high, d[i + 3] + bias_high), pack(d[i + 4] + bias_low, d[i + 5] + bias_low),
                     pack(d[i + 6] + bias_high, d[i + 7] + bias_high));
    }
#endif
    sync_warpgroup(1 + warpgroup);
    for (int piece = thread; piece < kOutTokens * 8; piece += 128) {
      const int to_token = token + base + piece / 8;
      const int to_row = row + piece % 8 * 8;
      if (to_token >= p.tokens || to_row >= p.schedule.rows) continue;
      const Words4 v = load_shared(out + piece / 8 * kOutStride + piece % 8 * 16);
      const u64 to = p.y_address + 2 * ((u64)to_token * p.y_stride + to_row);
      if (wide && to_row + 8 <= p.schedule.rows) {
        store_global(to, v);
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const unsigned short bits = (unsigned short)(v.word[i / 2] >> (16 * (i % 2)));
          if (to_row + i < p.schedule.rows) store_element(to + 2 * i, bits);
        }
      }
    }
  }
}

// One warpgroup: its 64 rows of each tile.
DEVICE void consume(const SplitParams& p, const Place& at, int warpgroup) {
  Cursor w, x;
  for (int step = 0;; ++step) {
    const SplitItem item = split_item(p.schedule, at.cluster, step);
    if (item.band < 0) break;
    float d[TILE_TOKENS / 2];
    int w_before = 0, x_before = 0;
    for (int column = 0; column < p.depth; column += kChunk) {
      wait(at.w_full + 8 * w.slot, w.parity, p.fault_address, kSiteWFull);
      wait(at.x_full + 8 * x.slot, x.parity, p.fault_address, kSiteXFull);
      const u64 a = describe(at.w + w.slot * kWSlotBytes + warpgroup * 64 * kRowBytes);
      const u64 b = describe(at.x + x.slot * kXSlotBytes);
      fence_products();
#pragma unroll
      for (int k = 0; k < kChunk / 16; ++k)
        multiply(d, a + k * kStepOf16Columns, b + k * kStepOf16Columns, column > 0 || k > 0);
      commit_products();
      // One chunk stays at work while the next slot is awaited; the slots of the chunk before it are free now.
      await_products<1>();
      if (column > 0) release(p, at, w_before, x_before);
      w_before = w.slot, x_before = x.slot;
      w.advance(at.w_stages);
      x.advance(at.x_stages);
    }
    await_products<0>();
    settle_products(d);
    release(p, at, w_before, x_before);
    const int row = item.band * p.schedule.cluster_rows + at.row_rank * kTileRows + warpgroup * 64;
    const int token = (item.token_block * p.token_ctas + at.token_rank) * TILE_TOKENS;
    write_out(p, at, warpgroup, row, token, d);
  }
}

DEVICE void run_split_linear(const SplitParams& p) {
  const Place at = find_place(p);
  const u32 warp = warp_index();
  allow_next_launch();
  if (thread_index() == 0) {
    for (int slot = 0; slot < at.w_stages; ++slot) {
      init_barrier(at.w_full + 8 * slot, 1);
      init_barrier(at.w_empty + 8 * slot, p.token_ctas * kConsumerWarps);
    }
    for (int slot = 0; slot < at.x_stages; ++slot) {
      init_barrier(at.x_full + 8 * slot, 1);
      init_barrier(at.x_empty + 8 * slot, p.row_ctas * kConsumerWarps);
    }
    fence_barrier_init();
  }
  sync_cluster();
  // Warpgroup 0 copies, the others multiply.
  if (warp < 4) {
    if constexpr (kMoveRegisters) give_registers<40>();
    if (warp == 0) {
      if (elected()) produce_w(p, at);
    } else if (warp == 1) {
      if (elected()) produce_x(p, at);
    }
    sync_warp();
  } else {
    if constexpr (kMoveRegisters) take_registers<232>();
    await_last_launch();
    consume(p, at, (int)warp / 4 - 1);
  }
  // A CTA that ends early would take its shared memory away from peers that still copy into it or arrive in it.
  sync_cluster();
}

}  // namespace penstock

#if !defined(PENSTOCK_EMULATED)
// The parameters stay where the launch put them: the copy engine reads the tensor maps by their address.
extern "C" __global__ void __launch_bounds__(penstock::kThreads, 1)
    split_linear(const __grid_constant__ penstock::SplitParams params) {
  penstock::run_split_linear(params);
}
#endif
