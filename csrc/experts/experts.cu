// Experts on a GPU: one warp decides which are in slots and which leave them, many blocks carry rows. Nothing of it waits
// for the host, and all of it may be captured. Compiled beforehand to PTX (bench/kernel_ptx.py), for compute capability 7.5.
//
// Decisions are those of expert_calls.cpp, word for word: tests/experts/test_kernels.py compares both with a third.
#include "experts/expert_table.h"

namespace penstock {
namespace {

constexpr unsigned kWarp = 0xFFFFFFFFu;
constexpr int kThreads = 256;
// Of one row, what a block carries at once: each thread four units.
constexpr int kUnitsATile = 4 * kThreads;
constexpr unsigned short kNoRow = 0xFFFF;

struct Table {
  __device__ Table(unsigned long long address, int experts, int slots)
      : at(table_layout(experts, slots)), base(reinterpret_cast<unsigned char*>(address)) {}
  __device__ unsigned* words(unsigned offset) const { return reinterpret_cast<unsigned*>(base + offset); }
  __device__ ExpertCounts& counts() const { return *reinterpret_cast<ExpertCounts*>(base); }

  TableLayout at;
  unsigned char* base;
};

__device__ int expert_at(unsigned long long index, int row, int experts) {
  const long long given = reinterpret_cast<const long long*>(index)[row];
  const long long expert = given < 0 ? given + experts : given;
  // As torch's own kernels do: an address beyond the weight is never made.
  if (expert < 0 || expert >= experts) __trap();
  return (int)expert;
}

__device__ int rows_of(unsigned long long ends, int expert) {
  const int* all = reinterpret_cast<const int*>(ends);
  return all[expert] - (expert ? all[expert - 1] : 0);
}

struct Best {
  unsigned long long key;
  int at;
};

// Of all lanes the least key; of equals the least place. -1: no lane has one.
__device__ Best least_of(Best mine) {
#pragma unroll
  for (int distance = 16; distance; distance /= 2) {
    const unsigned long long key = __shfl_xor_sync(kWarp, mine.key, distance);
    const int at = __shfl_xor_sync(kWarp, mine.at, distance);
    if (at >= 0 && (mine.at < 0 || key < mine.key || (key == mine.key && at < mine.at))) mine = {key, at};
  }
  return mine;
}

// One lane's.
__device__ void take(const Table& table, unsigned expert, unsigned slot) {
  unsigned* owner = table.words(table.at.owner);
  unsigned* slot_of = table.words(table.at.slot_of);
  if (const unsigned before = owner[slot]) slot_of[before - 1] = 0;
  owner[slot] = expert + 1;
  slot_of[expert] = slot + 1;
  table.words(table.at.source)[expert] = kFirstSlot + 2 * slot + 1;
}

__device__ void admit_all(const Table& table, int slots, unsigned found, unsigned now, int lane) {
  const unsigned* owner = table.words(table.at.owner);
  const unsigned* source = table.words(table.at.source);
  for (unsigned i = 0; i < found; ++i) {
    const unsigned expert = table.words(table.at.found)[i];
    if (source[expert] != kReadWhole) continue;
    // An empty slot counts less than any expert.
    Best best{~0ull, -1};
    for (int slot = lane; slot < slots; slot += 32) {
      unsigned long long key = 0;
      if (const unsigned held = owner[slot]) {
        if (source[held - 1] != kNotWanted) continue;
        key = 1 + priority(table.words(table.at.uses)[held - 1], table.words(table.at.last)[held - 1], now);
      }
      if (best.at < 0 || key < best.key) best = {key, slot};
    }
    best = least_of(best);
    if (best.at < 0) return;  // nor will there be one for those that follow
    if (lane == 0) take(table, expert, (unsigned)best.at);
    __syncwarp();
  }
}

__device__ void admit_most(const Table& table, const ChooseCall& call, unsigned now, int lane) {
  const unsigned* owner = table.words(table.at.owner);
  const unsigned* source = table.words(table.at.source);
  for (int slot = 0; slot < call.slots; ++slot) {
    if (owner[slot]) continue;
    // The most rows, as the least key.
    Best best{~0ull, -1};
    for (int expert = lane; expert < call.experts; expert += 32) {
      if (source[expert] != kReadWhole) continue;
      const unsigned long long key = 0xFFFFFFFFull - (unsigned)rows_of(call.index, expert);
      if (best.at < 0 || key < best.key) best = {key, expert};
    }
    best = least_of(best);
    if (best.at < 0) return;
    if (lane == 0) {
      const unsigned rows = (unsigned)(0xFFFFFFFFull - best.key);
      take(table, (unsigned)best.at, (unsigned)slot);
      table.words(table.at.uses)[best.at] = kUseWeight * (rows < kMostUsesACall ? rows : kMostUsesACall);
      table.words(table.at.last)[best.at] = now;
    }
    __syncwarp();
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(32) penstock_choose_experts(const __grid_constant__ ChooseCall call) {
  __shared__ unsigned wanted[kMostExperts / 32];
  const int lane = threadIdx.x;
  const Table table(call.table, call.experts, call.slots);
  unsigned* source = table.words(table.at.source);
  for (unsigned word = lane; word < log_words(call.experts); word += 32) wanted[word] = 0;
  __syncwarp();
  if (!call.by_ends)
    for (int row = lane; row < call.rows; row += 32) {
      const int expert = expert_at(call.index, row, call.experts);
      atomicOr(&wanted[expert / 32], 1u << (expert % 32));
    }
  __syncwarp();
  const unsigned now = *table.words(table.at.calls) + 1;
  unsigned found = 0, hits = 0;
  for (int base = 0; base < call.experts; base += 32) {
    const int expert = base + lane;
    const bool is_wanted =
        expert < call.experts &&
        (call.by_ends ? rows_of(call.index, expert) > 0 : (wanted[expert / 32] >> (expert % 32) & 1) != 0);
    const unsigned slot = is_wanted ? table.words(table.at.slot_of)[expert] : 0;
    const unsigned all = __ballot_sync(kWarp, is_wanted);
    hits += __popc(__ballot_sync(kWarp, slot != 0));
    if (expert < call.experts)
      source[expert] = !is_wanted ? kNotWanted : slot ? kFirstSlot + 2 * (slot - 1) : kReadWhole;
    if (is_wanted) {
      table.words(table.at.found)[found + __popc(all & ((1u << lane) - 1))] = (unsigned)expert;
      if (!call.by_ends) {
        unsigned& uses = table.words(table.at.uses)[expert];
        unsigned& last = table.words(table.at.last)[expert];
        uses = decayed(uses, last, now) + kUseWeight;
        last = now;
      }
    }
    found += __popc(all);
  }
  __syncwarp();
  if (call.by_ends) admit_most(table, call, now, lane);
  else admit_all(table, call.slots, found, now, lane);
  if (!call.by_ends) {
    const unsigned logged = *table.words(table.at.logged), words = log_words(call.experts);
    unsigned* log = table.words(table.at.log) + logged % kLogCalls * words;
    for (unsigned word = lane; word < words; word += 32) log[word] = wanted[word];
    __syncwarp();
    if (lane == 0) *table.words(table.at.logged) = logged + 1;
  }
  if (lane == 0) {
    *table.words(table.at.calls) = now;
    *table.words(table.at.found_count) = found;
    ExpertCounts& counts = table.counts();
    if (call.begins_run) counts.run_hits = counts.run_misses = 0;
    counts.calls += 1;
    counts.hits += hits;
    counts.misses += found - hits;
    counts.run_hits += hits;
    counts.run_misses += found - hits;
  }
}

namespace {

__device__ uint4 read(const uint4* from) { return *from; }

// Where each expert's row is, and is to be put: of the slot nothing, or what holds it, or what is to.
struct Way {
  const uint4* from;
  uint4* slot;
};

__device__ Way way_of(const MoveCall& call, unsigned expert) {
  const long long units = call.row_bytes / kExpertUnitBytes;
  const uint4* whole = reinterpret_cast<const uint4*>(call.whole) + expert * units;
  if (!call.table) return {whole, nullptr};
  const Table table(call.table, call.experts, call.slots);
  const unsigned source = table.words(table.at.source)[expert];
  if (source < kFirstSlot) return {whole, nullptr};
  uint4* slot = reinterpret_cast<uint4*>(call.slots_at) + (source - kFirstSlot) / 2 * units;
  return (source - kFirstSlot) % 2 ? Way{whole, slot} : Way{slot, nullptr};
}

}  // namespace

// By ends: tile after tile of the experts that have rows.
extern "C" __global__ void __launch_bounds__(kThreads) penstock_move_groups(const __grid_constant__ MoveCall call) {
  const long long units = call.row_bytes / kExpertUnitBytes;
  const long long tiles = (units + kUnitsATile - 1) / kUnitsATile;
  for (long long t = blockIdx.x; t < tiles * (call.end - call.first); t += gridDim.x) {
    const int expert = call.first + (int)(t / tiles);
    if (rows_of(call.index, expert) <= 0) continue;
    const Way way = way_of(call, (unsigned)expert);
    uint4* out = reinterpret_cast<uint4*>(call.out) + (expert - call.first) * units;
    const long long begin = t % tiles * kUnitsATile + threadIdx.x;
    uint4 units_of[4];
#pragma unroll
    for (int u = 0; u < 4; ++u)
      if (begin + u * kThreads < units) units_of[u] = read(way.from + begin + u * kThreads);
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      const long long at = begin + u * kThreads;
      if (at >= units) continue;
      if (way.slot) way.slot[at] = units_of[u];
      out[at] = units_of[u];
    }
  }
}

// By index: each expert is read once, however many rows ask for it.
extern "C" __global__ void __launch_bounds__(kThreads) penstock_move_rows(const __grid_constant__ MoveCall call) {
  // Rows by their expert: the first, and after each the next.
  __shared__ unsigned short first_of[kMostExperts];
  __shared__ unsigned short next_of[kMostRowsAMove];
  __shared__ unsigned short expert_of[kMostRowsAMove];
  for (int expert = threadIdx.x; expert < call.experts; expert += kThreads) first_of[expert] = kNoRow;
  for (int row = threadIdx.x; row < call.rows; row += kThreads)
    expert_of[row] = (unsigned short)expert_at(call.index, row, call.experts);
  __syncthreads();
  if (threadIdx.x == 0)
    for (int row = call.rows; row-- > 0;) {
      next_of[row] = first_of[expert_of[row]];
      first_of[expert_of[row]] = (unsigned short)row;
    }
  __syncthreads();
  const long long units = call.row_bytes / kExpertUnitBytes;
  const long long tiles = (units + kUnitsATile - 1) / kUnitsATile;
  // Rows in the order in which they come; those that are not the first of their expert have nothing to do.
  for (long long t = blockIdx.x; t < tiles * call.rows; t += gridDim.x) {
    const int row = (int)(t / tiles);
    const unsigned expert = expert_of[row];
    if (first_of[expert] != row) continue;
    const Way way = way_of(call, expert);
    const long long begin = t % tiles * kUnitsATile + threadIdx.x;
    uint4 units_of[4];
#pragma unroll
    for (int u = 0; u < 4; ++u)
      if (begin + u * kThreads < units) units_of[u] = read(way.from + begin + u * kThreads);
    for (unsigned to = row; to != kNoRow; to = next_of[to]) {
      uint4* out = reinterpret_cast<uint4*>(call.out) + to * units;
#pragma unroll
      for (int u = 0; u < 4; ++u)
        if (begin + u * kThreads < units) out[begin + u * kThreads] = units_of[u];
    }
    if (!way.slot) continue;
#pragma unroll
    for (int u = 0; u < 4; ++u)
      if (begin + u * kThreads < units) way.slot[begin + u * kThreads] = units_of[u];
  }
}

// Rows of a group of experts to the beginning, and back.
extern "C" __global__ void __launch_bounds__(kThreads) penstock_shift_rows(const __grid_constant__ ShiftCall call) {
  const int* ends = reinterpret_cast<const int*>(call.ends);
  const long long begin = call.first ? ends[call.first - 1] : 0, count = ends[call.end - 1] - begin;
  const bool is_back = !call.ends_out;
  for (int expert = call.first + threadIdx.x; expert < call.end; expert += kThreads) {
    const int before = expert ? ends[expert - 1] : 0;
    // As for indexes: no address beyond the rows is made, neither here nor by the product.
    if (ends[expert] > before && (before < 0 || ends[expert] > call.rows)) __trap();
    if (!is_back && blockIdx.x == 0) reinterpret_cast<int*>(call.ends_out)[expert - call.first] = ends[expert] - (int)begin;
  }
  __syncthreads();
  const long long units = call.row_bytes / kExpertUnitBytes, shift = begin * units;
  const uint4* from = reinterpret_cast<const uint4*>(call.from) + (is_back ? 0 : shift);
  uint4* to = reinterpret_cast<uint4*>(call.to) + (is_back ? shift : 0);
  for (long long at = (long long)blockIdx.x * kThreads + threadIdx.x; at < count * units;
       at += (long long)gridDim.x * kThreads)
    to[at] = from[at];
}

}  // namespace penstock
