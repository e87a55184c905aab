// The reader of the flat numbers. It refuses what is out of place before using it.
#include "plan/plan_records.h"

#include <string>

#include "experts/expert_table.h"
#include "penstock_records.h"

namespace penstock {
namespace {

// A session allocates memory per step, and no numbers in a plan bound it. This is the limit that a description has.
constexpr int64_t kMostSteps = (int64_t{1} << 22) + 1;

// Two or three slots are as good as any number.
constexpr int64_t kMostSlots = (1 << 10) + 1;
// The pool's granularity: a weight's bytes are rounded up to a multiple of it.
constexpr int64_t kMostUnitBytes = (int64_t{1} << 40) + 1;

// How many numbers each kind of record has in a plan.
constexpr size_t kPieceNumbers = 5, kMemberNumbers = 3, kAccessNumbers = 9, kStayNumbers = 2, kCopyNumbers = 3 + kPieceNumbers;

// Checked so that every sum of these numbers lies in the weight, and in the range.
PieceRecord read_bytes(RecordReader& in, const std::vector<int64_t>& weight_bytes) {
  PieceRecord piece{};
  piece.weight = in.next(0, (int64_t)weight_bytes.size());
  const int64_t all = weight_bytes[(size_t)piece.weight];
  piece.weight_offset_bytes = in.next(0, all + 1);
  piece.bytes = in.next(1, all - piece.weight_offset_bytes + 1);
  return piece;
}

PieceRecord read_piece(RecordReader& in, const PlanRecord& plan, const std::vector<int64_t>& weight_bytes) {
  PieceRecord piece = read_bytes(in, weight_bytes);
  piece.range = in.next(0, (int64_t)plan.ranges.size());
  piece.range_offset_bytes = in.next(0, plan.ranges[(size_t)piece.range].bytes - piece.bytes + 1);
  return piece;
}

StoreRecord read_store(RecordReader& in, const PlanRecord& plan, const std::vector<int64_t>& weight_bytes) {
  StoreRecord store{};
  store.piece = read_bytes(in, weight_bytes);
  store.piece.range = in.next(0, (int64_t)plan.ranges.size());
  const int64_t range_bytes = plan.ranges[(size_t)store.piece.range].bytes;
  store.piece.range_offset_bytes = in.next(0, range_bytes + 1);
  store.room_bytes = in.next(1, range_bytes - store.piece.range_offset_bytes + 1);
  return store;
}

// Checks that `bytes` bytes from the offset on lie in the range.
void read_room(RecordReader& in, const PlanRecord& plan, int64_t bytes, int64_t& range, int64_t& offset_bytes) {
  range = in.next(0, (int64_t)plan.ranges.size());
  offset_bytes = in.next(0, plan.ranges[(size_t)range].bytes - bytes + 1);
}

BankRecord read_bank(RecordReader& in, const PlanRecord& plan, const std::vector<int64_t>& weight_bytes) {
  BankRecord bank{};
  bank.experts = in.next(1, kMostExperts + 1);
  bank.slots = in.next(1, bank.experts + 1);
  read_room(in, plan, table_layout((int)bank.experts, (int)bank.slots).bytes, bank.range, bank.range_offset_bytes);
  for (size_t i = in.length(kMemberNumbers); i > 0; --i) {
    BankMemberRecord member{};
    member.weight = in.next(0, (int64_t)weight_bytes.size());
    const int64_t all = weight_bytes[(size_t)member.weight];
    member.row_bytes = all / bank.experts;
    if (!member.row_bytes || all % bank.experts || member.row_bytes % kExpertUnitBytes)
      throw RecordError("weight " + std::to_string(member.weight) + " of a bank has " + std::to_string(all) +
                        " bytes, which are not " + std::to_string(bank.experts) + " experts");
    // There are no more slots than experts, so the slots' bytes are no more than the weight's.
    read_room(in, plan, bank.slots * member.row_bytes, member.range, member.range_offset_bytes);
    bank.members.push_back(member);
  }
  return bank;
}

AccessRecord read_access(RecordReader& in, const PlanRecord& plan, const std::vector<int64_t>& weight_bytes,
                         int64_t stays) {
  AccessRecord access{};
  access.number = in.next();
  access.weight = in.next(0, (int64_t)weight_bytes.size());
  // A plan for weights of other sizes is for another program.
  const int64_t all = weight_bytes[(size_t)access.weight];
  access.bytes = in.next(all, all + 1);
  access.range = in.next(kDirect, (int64_t)plan.ranges.size());
  access.range_offset_bytes = in.next();
  access.stay = in.next(-1, access.range == kDirect ? 0 : stays);
  // Only an access with a range can be split, into two parts that both have bytes. The first does not stream.
  access.prefix_bytes = in.next(-1, access.range < 0 ? 0 : access.bytes);
  if (access.is_split()) {
    in.last(1, 1, access.bytes);
    in.last(2, -1, 0);
  }
  const int64_t there = access.is_split() ? access.prefix_bytes : access.range == kDirect ? 0 : access.bytes;
  in.last(3, 0, (access.range < 0 ? 0 : plan.ranges[(size_t)access.range].bytes) - there + 1);
  access.bank = in.next(kNoSlots, (int64_t)plan.banks.size());
  access.chooses = in.next(0, access.bank >= 0 ? 2 : 1);
  if (access.bank < 0) return access;
  in.last(6, kDirect, kDirect + 1);  // an expert in no slot is read where it lies
  const std::vector<BankMemberRecord>& members = plan.banks[(size_t)access.bank].members;
  while (access.member < members.size() && members[access.member].weight != access.weight) ++access.member;
  if (access.member == members.size())
    throw RecordError("an access of weight " + std::to_string(access.weight) + " is given to bank " +
                      std::to_string(access.bank) + ", which has others");
  return access;
}

MethodRecord read_method(RecordReader& in, const PlanRecord& plan, const std::vector<int64_t>& weight_bytes) {
  MethodRecord method{};
  method.step_count = in.next(0, kMostSteps);
  method.accesses.resize(in.length(kAccessNumbers));
  size_t stays = in.length(kStayNumbers);
  for (AccessRecord& access : method.accesses) access = read_access(in, plan, weight_bytes, (int64_t)stays);
  method.stays.resize(stays);
  for (StayRecord& stay : method.stays) {
    stay.bytes = in.next(1, INT64_MAX);
    stay.last_step = in.next(0, method.step_count);
  }
  method.copies.resize(in.length(kCopyNumbers));
  for (CopyRecord& copy : method.copies) {
    copy.stay = in.next(0, (int64_t)stays);
    copy.issue_before = in.next(0, (int64_t)method.accesses.size() + 1);
    copy.wait_step = in.next(-1, method.step_count);
    copy.piece = read_piece(in, plan, weight_bytes);
  }
  for (size_t i = in.length(); i > 0; --i) method.prologue.push_back(in.next(0, (int64_t)method.copies.size()));
  return method;
}

}  // namespace

PlanRecord read_plan(const int64_t* numbers, size_t count, const std::vector<int64_t>& weight_bytes) {
  RecordReader in(numbers, count, "the plan");
  PlanRecord plan;
  plan.block_bytes.resize(in.length());
  int64_t all_bytes = 0;
  for (int64_t& bytes : plan.block_bytes) bytes = in.next_of(all_bytes);
  plan.ranges.resize(in.length());
  for (RangeRecord& range : plan.ranges) {
    range.bytes = 0;
    for (size_t i = in.length(); i > 0; --i) {
      range.blocks.push_back(in.next(0, (int64_t)plan.block_bytes.size()));
      int64_t bytes = plan.block_bytes[range.blocks.back()];
      if (bytes > all_bytes - range.bytes)
        throw RecordError("a range of the plan has more bytes than all blocks: it maps one twice");
      range.bytes += bytes;
    }
  }
  for (size_t i = in.length(kPieceNumbers); i > 0; --i) plan.fills.push_back(read_piece(in, plan, weight_bytes));
  if ((plan.slots = in.next(0, kMostSlots))) {
    plan.slot_range = in.next(0, (int64_t)plan.ranges.size());
    plan.slot_bytes = in.next(1, plan.ranges[plan.slot_range].bytes / plan.slots + 1);
  }
  for (size_t i = in.length(kPieceNumbers); i > 0; --i) plan.stores.push_back(read_store(in, plan, weight_bytes));
  for (size_t i = in.length(); i > 0; --i) plan.banks.push_back(read_bank(in, plan, weight_bytes));
  for (size_t i = in.length(); i > 0; --i) plan.methods.push_back(read_method(in, plan, weight_bytes));
  in.finish();
  return plan;
}

void add_slots(PlanRecord& plan, int64_t slots, int64_t slot_bytes, int64_t total_bytes) {
  int64_t all_bytes = 0;
  for (int64_t bytes : plan.block_bytes) all_bytes += bytes;
  if (plan.slots || slots < 1 || slots >= kMostSlots || slot_bytes < 1 || total_bytes >= INT64_MAX - all_bytes ||
      slot_bytes > total_bytes / slots)
    throw RecordError(std::to_string(slots) + " slots of " + std::to_string(slot_bytes) + " bytes in " +
                      std::to_string(total_bytes) + " cannot be added to a plan that has " +
                      std::to_string(plan.slots));
  plan.slots = slots;
  plan.slot_bytes = slot_bytes;
  plan.slot_range = (int64_t)plan.ranges.size();
  plan.ranges.push_back({total_bytes, {(int64_t)plan.block_bytes.size()}});
  plan.block_bytes.push_back(total_bytes);
}

LruRecord read_lru(const int64_t* numbers, size_t count, const std::vector<int64_t>& weight_bytes) {
  RecordReader in(numbers, count, "the plan");
  LruRecord record{};
  record.budget_bytes = in.next(0, INT64_MAX);
  record.granularity_bytes = in.next(1, kMostUnitBytes);
  record.weights.resize(in.length(2));
  for (LruWeightRecord& weight : record.weights) {
    weight.weight = in.next(0, (int64_t)weight_bytes.size());
    weight.bytes = weight_bytes[(size_t)weight.weight];
    weight.pinned = in.next(0, 2);
  }
  record.methods.resize(in.length());
  for (LruMethodRecord& method : record.methods) {
    method.step_count = in.next(0, kMostSteps);
    method.accesses.resize(in.length(3));
    for (LruAccessRecord& access : method.accesses) {
      access.number = in.next();
      access.weight = in.next(0, (int64_t)record.weights.size());
      access.last_step = in.next(0, method.step_count);
    }
  }
  in.finish();
  return record;
}

}  // namespace penstock
