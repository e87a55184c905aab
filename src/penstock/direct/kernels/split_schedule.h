// Which tile each cluster takes, and where its rows lie: integer arithmetic alone, the same on the device, in the tests
// (compiled by a C++ compiler) and, mirrored, in src/penstock/direct/schedule.py.
//
// An item is a band of cluster_rows rows of W times one block of tokens. Bands that hold any host row belong to the
// host side. Host items go round the host-facing clusters, HBM items round the others; a host-facing cluster takes
// `helped` HBM items once its own are done. Nobody else ever asks the host, so the requests in flight stay what was
// set.
#pragma once

#include "split_params.h"

#if defined(__CUDACC__)
#define PENSTOCK_BOTH __host__ __device__ __forceinline__
#else
#define PENSTOCK_BOTH inline
#endif

namespace penstock {

// Columns of W in one stage: 64 elements of two bytes are the 128 bytes that the swizzle works on.
constexpr int kChunk = 64;
// The grain of the split. Two swizzle atoms of 8 rows, so a box of 16 rows starts on an atom wherever it starts.
constexpr int kGrain = 16;

struct SplitItem {
  int band;         // -1: nothing more to do
  int token_block;
};

PENSTOCK_BOTH int smaller(int a, int b) { return a < b ? a : b; }
PENSTOCK_BOTH int larger(int a, int b) { return a > b ? a : b; }
PENSTOCK_BOTH int split_bands(const SplitSchedule& s) { return (s.rows + s.cluster_rows - 1) / s.cluster_rows; }
PENSTOCK_BOTH int split_hbm_bands(const SplitSchedule& s) {
  return smaller(s.split_row / s.cluster_rows, split_bands(s));
}

// The step-th item of a cluster.
PENSTOCK_BOTH SplitItem split_item(const SplitSchedule& s, int cluster, int step) {
  const int hbm_bands = split_hbm_bands(s);
  const int hbm_items = hbm_bands * s.token_blocks;
  const int host_items = (split_bands(s) - hbm_bands) * s.token_blocks;
  const int helped_items = smaller(s.host_clusters * s.helped, hbm_items);
  int item;
  if (cluster < s.host_clusters) {
    item = cluster + step * s.host_clusters;
    if (item < host_items) return {hbm_bands + item / s.token_blocks, item % s.token_blocks};
    const int own = cluster < host_items ? (host_items - cluster + s.host_clusters - 1) / s.host_clusters : 0;
    item = cluster + (step - own) * s.host_clusters;
    if (item >= helped_items) return {-1, 0};
  } else {
    item = helped_items + (cluster - s.host_clusters) + step * (s.clusters - s.host_clusters);
    if (item >= hbm_items) return {-1, 0};
  }
  return {item / s.token_blocks, item % s.token_blocks};
}

// Bytes that a load of rows [row, row + count), columns [column, column + kChunk) asks of the host. What lies outside
// of the matrix is filled with zeros by the copy engine and asked of nobody.
PENSTOCK_BOTH int split_host_bytes(const SplitSchedule& s, int depth, int row, int count, int column) {
  const int from = larger(row, s.split_row);
  const int to = smaller(row + count, s.rows);
  return to > from ? (to - from) * smaller(kChunk, depth - column) * 2 : 0;
}

}  // namespace penstock
