// A plan as the core gets it: flat 64-bit numbers, read once into these records. src/penstock/runtime/records.py writes
// them in the same order. Later placements add kinds of access, not tables.
//
// A plan names weights by their numbers in the session, and bytes by their offset in the weight. Only the source knows
// where a weight lies in its file, so one plan is good for every file that has these weights.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace penstock {

// One copy: bytes of a weight to an offset in a range.
struct PieceRecord {
  int64_t weight;
  int64_t weight_offset_bytes;
  int64_t bytes;
  int64_t range;
  int64_t range_offset_bytes;
};

struct RangeRecord {
  int64_t bytes;
  std::vector<int64_t> blocks;
};

constexpr int64_t kDirect = -2;
// In place of a bank: the access reads no experts, or experts without slots.
constexpr int64_t kNoExperts = -1;
constexpr int64_t kNoSlots = -2;

struct AccessRecord {
  int64_t number;
  int64_t weight;
  int64_t bytes;  // of the weight
  int64_t range;  // -1: a weight without bytes; kDirect: read where it lies in host memory
  int64_t range_offset_bytes;
  int64_t stay;  // -1: resident
  int64_t prefix_bytes;  // -1: not split; else these are at range_offset_bytes, the rest is read where it lies
  int64_t bank;     // the bank whose slots it reads from
  int64_t chooses;  // 1: its index decides what the slots hold from here on, for the bank's other members too
  size_t member = 0;  // the bank's member that is its own weight

  bool is_split() const { return prefix_bytes >= 0; }
  bool reads_experts() const { return bank != kNoExperts; }
  // For experts with slots, the device counts what crosses the link.
  int64_t in_place_bytes() const {
    return bank >= 0 ? 0 : range == kDirect ? bytes : is_split() ? bytes - prefix_bytes : 0;
  }
};

// One weight in the ring, from its copies to its last reader.
struct StayRecord {
  int64_t bytes;
  int64_t last_step;
};

// One piece of a stay, and when it is copied.
struct CopyRecord {
  int64_t stay;
  int64_t issue_before;
  int64_t wait_step;  // -1: none
  PieceRecord piece;
};

struct MethodRecord {
  int64_t step_count;
  std::vector<AccessRecord> accesses;
  std::vector<StayRecord> stays;
  // In the order of issue.
  std::vector<CopyRecord> copies;
  // Copies that are in place when a run begins, in the order in which they are needed.
  std::vector<int64_t> prologue;
};

// Bytes of a weight that stay in device memory still packed, as in the file: at most room_bytes of them.
struct StoreRecord {
  PieceRecord piece;  // `bytes` counts unpacked bytes of the weight
  int64_t room_bytes;
};

// A weight of a bank, and where its slots lie.
struct BankMemberRecord {
  int64_t weight;
  int64_t row_bytes;
  int64_t range;
  int64_t range_offset_bytes;
};

// Weights whose rows are taken by one index, with `slots` slots for rows of each. Their table is in a range as well.
struct BankRecord {
  int64_t experts;
  int64_t slots;
  int64_t range;
  int64_t range_offset_bytes;
  std::vector<BankMemberRecord> members;
};

struct PlanRecord {
  std::vector<int64_t> block_bytes;
  std::vector<RangeRecord> ranges;
  std::vector<PieceRecord> fills;
  // Slots that packed weights pass through, one behind the other from the beginning of a range; and what stays packed.
  int64_t slots = 0;
  int64_t slot_bytes = 0;
  int64_t slot_range = 0;
  std::vector<StoreRecord> stores;
  std::vector<BankRecord> banks;
  std::vector<MethodRecord> methods;
};

// The least-recently-used policy decides while running, so it gets sizes and the order, but no addresses.
struct LruWeightRecord {
  int64_t weight;
  int64_t bytes;
  int64_t pinned;
};

struct LruAccessRecord {
  int64_t number;
  int64_t weight;
  int64_t last_step;
};

struct LruMethodRecord {
  int64_t step_count;
  std::vector<LruAccessRecord> accesses;
};

struct LruRecord {
  int64_t budget_bytes;
  int64_t granularity_bytes;
  std::vector<LruWeightRecord> weights;
  std::vector<LruMethodRecord> methods;
};

// `weight_bytes`: the unpacked bytes of each weight of the session. Both throw RecordError when the numbers make no
// plan: too few, too many, out of range, or beyond the end of a weight.
PlanRecord read_plan(const int64_t* numbers, size_t count, const std::vector<int64_t>& weight_bytes);
LruRecord read_lru(const int64_t* numbers, size_t count, const std::vector<int64_t>& weight_bytes);

// If weights are packed, this adds slots for their bytes to a plan that was made for unpacked weights: one more block,
// with a range of its own. Throws RecordError if the plan has slots already, or if these do not fit into `total_bytes`.
void add_slots(PlanRecord& plan, int64_t slots, int64_t slot_bytes, int64_t total_bytes);

}  // namespace penstock
