// The reader of the flat numbers. It refuses what is out of place before anything is made of it.
#include "plan/plan_records.h"

#include <string>

#include "driver/driver.h"

namespace penstock {
namespace {

class Reader {
 public:
  Reader(const int64_t* numbers, size_t count) : numbers_(numbers), count_(count) {}

  int64_t next() {
    if (at_ >= count_) throw CoreError(Failure::usage, "the plan's records end after " + std::to_string(count_));
    return numbers_[at_++];
  }

  // A number that must lie in [low, high).
  int64_t next(int64_t low, int64_t high) {
    next();
    return last(1, low, high);
  }

  // The same of one that was read before: the `back`-th last.
  int64_t last(size_t back, int64_t low, int64_t high) const {
    int64_t value = numbers_[at_ - back];
    if (value < low || value >= high)
      throw CoreError(Failure::usage, "number " + std::to_string(at_ - back) + " of the plan's records is " +
                                          std::to_string(value) + ", needs to be in [" + std::to_string(low) + ", " +
                                          std::to_string(high) + ")");
    return value;
  }

  // So many bytes more, of a sum that must stay a number.
  int64_t next_of(int64_t& sum) {
    int64_t value = next(1, INT64_MAX - sum);
    sum += value;
    return value;
  }

  size_t length() { return (size_t)next(0, (int64_t)count_ + 1); }

  void finish() const {
    if (at_ != count_)
      throw CoreError(Failure::usage, "the plan has " + std::to_string(count_) + " numbers, its records need " +
                                          std::to_string(at_));
  }

 private:
  const int64_t* numbers_;
  size_t count_;
  size_t at_ = 0;
};

PieceRecord read_piece(Reader& in, const PlanRecord& plan) {
  PieceRecord piece{};
  piece.source_offset_bytes = in.next(0, INT64_MAX);
  piece.bytes = in.next(1, INT64_MAX - piece.source_offset_bytes);
  piece.range = in.next(0, (int64_t)plan.ranges.size());
  piece.range_offset_bytes = in.next(0, plan.ranges[piece.range].bytes - piece.bytes + 1);
  return piece;
}

StoreRecord read_store(Reader& in, const PlanRecord& plan) {
  StoreRecord store{};
  store.piece.source_offset_bytes = in.next(0, INT64_MAX);
  store.piece.bytes = in.next(1, INT64_MAX - store.piece.source_offset_bytes);
  store.piece.range = in.next(0, (int64_t)plan.ranges.size());
  const int64_t range_bytes = plan.ranges[store.piece.range].bytes;
  store.piece.range_offset_bytes = in.next(0, range_bytes + 1);
  store.room_bytes = in.next(1, range_bytes - store.piece.range_offset_bytes + 1);
  return store;
}

AccessRecord read_access(Reader& in, const PlanRecord& plan, int64_t stays) {
  AccessRecord access{};
  access.number = in.next();
  access.bytes = in.next(0, INT64_MAX);
  access.range = in.next(kDirect, (int64_t)plan.ranges.size());
  access.range_offset_bytes = in.next();
  access.stay = in.next(-1, access.range == kDirect ? 0 : stays);
  // Only what has a range can be split: into two parts that both have bytes, of which the first does not stream.
  access.prefix_bytes = in.next(-1, access.range < 0 ? 0 : access.bytes);
  if (access.is_split()) {
    in.last(1, 1, access.bytes);
    in.last(2, -1, 0);
  }
  // Whether it lies in the file, the source knows.
  access.source_offset_bytes = in.next(0, INT64_MAX - access.bytes);
  int64_t limit = access.range == kDirect ? INT64_MAX - 1 : access.range < 0 ? 0 : plan.ranges[access.range].bytes;
  in.last(4, 0, limit - (access.is_split() ? access.prefix_bytes : access.bytes) + 1);
  return access;
}

MethodRecord read_method(Reader& in, const PlanRecord& plan) {
  MethodRecord method{};
  method.step_count = in.next(0, INT64_MAX);
  method.accesses.resize(in.length());
  size_t stays = in.length();
  for (AccessRecord& access : method.accesses) access = read_access(in, plan, (int64_t)stays);
  method.stays.resize(stays);
  for (StayRecord& stay : method.stays) {
    stay.bytes = in.next(1, INT64_MAX);
    stay.last_step = in.next(0, method.step_count);
  }
  method.copies.resize(in.length());
  for (CopyRecord& copy : method.copies) {
    copy.stay = in.next(0, (int64_t)stays);
    copy.issue_before = in.next(0, (int64_t)method.accesses.size() + 1);
    copy.wait_step = in.next(-1, method.step_count);
    copy.piece = read_piece(in, plan);
  }
  for (size_t i = in.length(); i > 0; --i) method.prologue.push_back(in.next(0, (int64_t)method.copies.size()));
  return method;
}

}  // namespace

PlanRecord read_plan(const int64_t* numbers, size_t count) {
  Reader in(numbers, count);
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
        throw CoreError(Failure::usage, "a range of the plan has more bytes than all blocks: it maps one twice");
      range.bytes += bytes;
    }
  }
  for (size_t i = in.length(); i > 0; --i) plan.fills.push_back(read_piece(in, plan));
  if ((plan.slots = in.next(0, INT32_MAX))) {
    plan.slot_range = in.next(0, (int64_t)plan.ranges.size());
    plan.slot_bytes = in.next(1, plan.ranges[plan.slot_range].bytes / plan.slots + 1);
  }
  for (size_t i = in.length(); i > 0; --i) plan.stores.push_back(read_store(in, plan));
  for (size_t i = in.length(); i > 0; --i) plan.methods.push_back(read_method(in, plan));
  in.finish();
  return plan;
}

LruRecord read_lru(const int64_t* numbers, size_t count) {
  Reader in(numbers, count);
  LruRecord record{};
  record.budget_bytes = in.next(0, INT64_MAX);
  record.granularity_bytes = in.next(1, INT64_MAX);
  record.weights.resize(in.length());
  for (LruWeightRecord& weight : record.weights) {
    weight.source_offset_bytes = in.next(0, INT64_MAX);
    weight.bytes = in.next(0, INT64_MAX);
    weight.pinned = in.next(0, 2);
  }
  record.methods.resize(in.length());
  for (LruMethodRecord& method : record.methods) {
    method.step_count = in.next(0, INT64_MAX);
    method.accesses.resize(in.length());
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
