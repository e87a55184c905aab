// What the split linear kernel is launched with: one plain C struct, passed by value. Python fills it through ctypes
// and C++ may fill it as it is; addresses are integers so that host and device agree on the layout without CUDA's
// headers.
#pragma once

namespace penstock {

using u32 = unsigned int;
using u64 = unsigned long long;

// CUtensorMap: 128 opaque bytes, at a multiple of 64 in CUDA 12's header and of 128 in CUDA 13's.
struct alignas(128) TensorMap {
  u64 words[16];
};

// How the tiles of W are dealt out; see split_schedule.h.
struct SplitSchedule {
  int split_row;            // tiles that end at or before this row lie in HBM; all of them, if nothing is on the host
  int rows;                 // N
  int cluster_rows;         // rows of W that one cluster takes in one item: tile rows times row_ctas
  int token_blocks;         // turns that the tokens are taken in because one cluster cannot hold them all; mostly 1
  int clusters;
  int host_clusters;        // clusters [0, host_clusters) face the host, all others read HBM alone
  int helped;               // HBM items that each host cluster takes when its host items are done
};

struct SplitParams {
  TensorMap x;              // boxes of 64 x (tile tokens / row_ctas)
  TensorMap prefix, rest;     // boxes of 64 x (tile rows / token_ctas)
  TensorMap prefix_16, rest_16;  // boxes of 64 x 16, for a tile that lies on both sides
  u64 y_address;
  u64 bias_address;         // 0: no bias
  u64 host_bytes_address;   // a 64-bit counter that is added to; 0: not counted
  u64 fault_address;        // eight 32-bit words that a bounded wait fills before it traps; 0: it only traps
  SplitSchedule schedule;
  int tokens;               // T
  int depth;                // K
  int y_stride;             // in elements, from row to row
  int token_ctas;           // CTAs of a cluster that share a tile of W
  int row_ctas;             // CTAs of a cluster that share a tile of x
  int w_stages, x_stages;   // slots in shared memory
  int host_w_stages;        // slots that a host-facing cluster uses: its requests in flight
};

}  // namespace penstock
