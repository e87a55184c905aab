// Creates and gives back a plan's memory, issues its copies and waits for them (S1 to S4).
#include "session/planned_session.h"

#include <algorithm>

#include "driver/cleanup.h"
#include "plan/plan_check.h"

namespace penstock {
namespace {
constexpr int64_t kMeasuredBytes = 64 << 20;
}  // namespace

void PlannedSession::install(PlanRecord plan) {
  check_plan(plan, (int64_t)driver_.granularity_bytes());
  retire_expert_counts();
  uninstall();
  plan_ = std::move(plan);
  Undo undo([&] { uninstall(); });
  create_memory();
  give_packed_memory();
  create_events();
  find_in_place();
  prepare_experts();
  fill_residents();
  measure();
  std::vector<Shape> shapes;
  for (const MethodRecord& method : plan_.methods) {
    Shape shape{{}, method.step_count};
    for (const AccessRecord& access : method.accesses) shape.numbers.push_back(access.number);
    shapes.push_back(std::move(shape));
  }
  set_shapes(std::move(shapes));
  undo.keep();
}

void PlannedSession::create_memory() {
  for (int64_t bytes : plan_.block_bytes) {
    blocks_.push_back(driver_.create_block((size_t)bytes));
    device_bytes_ += bytes;
    peak_device_bytes_ = std::max(peak_device_bytes_, device_bytes_);
  }
  for (const RangeRecord& record : plan_.ranges) {
    if (record.bytes == 0) {
      ranges_.push_back({0, 0, 0});
      continue;
    }
    ranges_.push_back({driver_.reserve((size_t)record.bytes), (size_t)record.bytes, 0});
    MappedRange& range = ranges_.back();
    for (int64_t block : record.blocks) {
      size_t bytes = (size_t)plan_.block_bytes[block];
      driver_.map(range.address + range.mapped_bytes, bytes, blocks_[block]);
      range.mapped_bytes += bytes;
    }
    driver_.allow_access(range.address, range.bytes);
    if (poison_) driver_.fill(range.address, kPoison, range.bytes, copy_stream_);
  }
}

void PlannedSession::give_packed_memory() {
  PackedMemory memory;
  memory.slot_bytes = plan_.slot_bytes;
  for (int64_t slot = 0; slot < plan_.slots; ++slot)
    memory.slots.push_back(ranges_[plan_.slot_range].address + (Address)(slot * plan_.slot_bytes));
  for (const StoreRecord& store : plan_.stores)
    memory.stores.push_back({store.piece, address_of(store.piece), store.room_bytes});
  // Wait for the poison fills: they must not come after the data that is put there.
  driver_.synchronize_stream(copy_stream_);
  source_.follow({}, {});
  source_.take_memory(memory);
}

void PlannedSession::create_events() {
  for (const MethodRecord& record : plan_.methods) {
    methods_.emplace_back();
    MethodState& method = methods_.back();
    method.steps.resize(record.step_count);
    method.stays.resize(record.stays.size());
    method.progress.resize(record.stays.size());
    for (size_t s = 0; s < record.stays.size(); ++s) {
      const StayRecord& stay = record.stays[s];
      method.stays[s].ready = driver_.create_event(false);
      method.steps[stay.last_step].last_read.push_back((int64_t)s);
    }
    for (size_t c = 0; c < record.copies.size(); ++c) {
      const CopyRecord& copy = record.copies[c];
      method.stays[copy.stay].copies.push_back((int64_t)c);
      if (copy.wait_step >= 0 && !method.steps[copy.wait_step].ended)
        method.steps[copy.wait_step].ended = driver_.create_event(false);
      method.cycle.push_back(copy.piece);
    }
    std::vector<size_t> prologue(record.stays.size());
    for (int64_t c : record.prologue) {
      method.prologue.push_back(record.copies[c].piece);
      prologue[record.copies[c].stay]++;
    }
    std::vector<int64_t> last_access(record.stays.size(), -1);
    for (size_t a = 0; a < record.accesses.size(); ++a)
      if (record.accesses[a].stay >= 0) last_access[record.accesses[a].stay] = (int64_t)a;
    for (size_t c = 0; c < record.copies.size(); ++c)
      if (record.copies[c].issue_before <= last_access[record.copies[c].stay]) {
        method.graph_copies = c + 1;
        StayState& stay = method.stays[record.copies[c].stay];
        stay.crosses = prologue[record.copies[c].stay] == stay.copies.size();
      }
    for (size_t c = method.graph_copies; c < record.copies.size(); ++c)
      if (record.copies[c].wait_step >= 0) method.steps[record.copies[c].wait_step].seen_outside = true;
  }
}

void PlannedSession::find_in_place() {
  for (size_t m = 0; m < methods_.size(); ++m)
    for (const AccessRecord& access : plan_.methods[m].accesses) {
      Address address = 0;
      if (access.range == kDirect) address = source_.direct(access.weight, 0, access.bytes);
      if (access.is_split())
        address = source_.direct(access.weight, access.prefix_bytes, access.bytes - access.prefix_bytes);
      methods_[m].in_place.push_back(address);
    }
}

void PlannedSession::fill_residents() {
  source_.follow({}, {});
  for (const PieceRecord& piece : plan_.fills) source_.load(piece, address_of(piece), copy_stream_);
  // S2 for resident bytes: no run begins before they are there.
  driver_.synchronize_stream(copy_stream_);
}

void PlannedSession::measure() {
  std::vector<std::pair<PieceRecord, Address>> copies;
  int64_t bytes = 0;
  for (const MethodRecord& method : plan_.methods)
    for (const CopyRecord& copy : method.copies) {
      if (bytes >= kMeasuredBytes) break;
      if (!source_.link_bytes(copy.piece)) continue;
      // No run has begun, so there is nothing in the ring to overwrite.
      copies.emplace_back(copy.piece, address_of(copy.piece));
      bytes += copy.piece.bytes;
    }
  measure_link(copies);
}

void PlannedSession::uninstall() noexcept {
  finish();
  has_tables_ = must_empty_tables_ = false;
  quietly([&] { source_.follow({}, {}); });
  // Graphs first: they wait for events of the source and of the plan.
  set_shapes({});
  quietly([&] { source_.take_memory({}); });
  for (MethodState& method : methods_) {
    for (StayState& stay : method.stays)
      for (Event event : {stay.ready, stay.ready_in_graph})
        if (event) quietly([&] { driver_.destroy_event(event); });
    for (StepState& step : method.steps)
      for (Event event : {step.ended, step.ended_in_graph})
        if (event) quietly([&] { driver_.destroy_event(event); });
  }
  for (Event* event : {&fork_, &lead_}) {
    if (*event) quietly([&] { driver_.destroy_event(*event); });
    *event = nullptr;
  }
  for (MappedRange& range : ranges_) {
    if (!range.bytes) continue;
    if (range.mapped_bytes) quietly([&] { driver_.unmap(range.address, range.mapped_bytes); });
    quietly([&] { driver_.unreserve(range.address, range.bytes); });
  }
  for (Block block : blocks_) quietly([&] { driver_.release_block(block); });
  methods_.clear();
  ranges_.clear();
  blocks_.clear();
  recipes_.clear();
  plan_ = {};
  device_bytes_ = 0;
}

Address PlannedSession::address_of(const PieceRecord& piece) const {
  return ranges_[piece.range].address + (Address)piece.range_offset_bytes;
}

Address PlannedSession::address_of(const AccessRecord& access) const {
  return access.range < 0 ? 0 : ranges_[access.range].address + (Address)access.range_offset_bytes;
}

void PlannedSession::begin_run(bool cold) {
  next_copy_ = 0;
  begin_tables();
  forget_many_recipes();
  if (!cold) return;
  MethodState& method = methods_[method_];
  forget_copies(method);
  source_.follow(method.prologue, method.cycle);
  // S1: other kernels may still read these pages. All later copies are behind this wait.
  if (has_run_) driver_.wait(copy_stream_, run_end_);
  // What was copied ahead when the method last ran is still right, and must not hide a copy that is missing now. All
  // other pages have been poison since their last reader. (And a graph's own copies do not follow this.)
  if (poison_)
    for (const PieceRecord& piece : method.prologue) poison(piece, copy_stream_);
  for (int64_t copy : plan_.methods[method_].prologue) issue(copy);
}

void PlannedSession::issue(int64_t index) {
  const CopyRecord& record = plan_.methods[method_].copies[index];
  const PieceRecord& piece = record.piece;
  MethodState& method = methods_[method_];
  if (record.wait_step >= 0) await_readers(method.steps[record.wait_step]);
  // Some of the stay's copies were made before the graph. A wait for this copy must cover those too.
  const Progress& progress = method.progress[record.stay];
  if (progress.before_graph && progress.issued) driver_.wait_external(copy_stream_, lead_);
  if (trace_) trace_->copy_begins(run_number_, method_, index, piece.bytes, copy_stream_);
  const CopiedBytes copied = source_.copy(piece, address_of(piece), copy_stream_, trace_.get());
  if (trace_) trace_->copy_ends(copy_stream_);
  run_.bytes_streamed += copied.over_link;
  run_.bytes_decoded += copied.decoded;
  run_.copies++;
  advance(method, index);
  if (progress.unread) announce(method.stays[record.stay]);
}

void PlannedSession::advance(MethodState& method, int64_t copy) {
  int64_t stay = plan_.methods[method_].copies[copy].stay;
  Progress& progress = method.progress[stay];
  progress.issued++;
  progress.unread = progress.issued == method.stays[stay].copies.size();
  progress.before_graph = false;
}

void PlannedSession::await_readers(StepState& step) {
  // S1. The event was recorded before this call: a step that ended in this run or the last.
  if (!capturing_) driver_.wait(copy_stream_, step.ended);
  else if (step.is_captured) driver_.wait(copy_stream_, step.ended_in_graph);
  // The last run's readers have ended when the graph begins. An ordinary run waits for them by their event.
  else step.seen_outside = true;
}

void PlannedSession::announce(StayState& stay) {
  if (!capturing_) {
    driver_.record(stay.ready, copy_stream_);
    return;
  }
  // Copies that a graph makes for the next run have arrived when the graph ends.
  driver_.record(stay.ready_in_graph, copy_stream_);
}

void PlannedSession::await_copies(StayState& stay, const Progress& progress) {
  // S2
  if (!capturing_) wait_for_copy(stay.ready);
  else if (progress.before_graph) driver_.wait_external(compute_, stay.ready);
  else driver_.wait(compute_, stay.ready_in_graph);
}

void PlannedSession::issue_until(int64_t position) {
  const std::vector<CopyRecord>& copies = plan_.methods[method_].copies;
  size_t end = capturing_ ? methods_[method_].graph_copies : copies.size();
  while (next_copy_ < end && copies[next_copy_].issue_before <= position) issue((int64_t)next_copy_++);
}

Address PlannedSession::acquire(int64_t position) {
  issue_until(position);
  const AccessRecord& access = plan_.methods[method_].accesses[position];
  run_.bytes_in_place += access.in_place_bytes();
  if (access.range == kDirect) return methods_[method_].in_place[position];
  if (access.is_split()) return address_of(access);
  run_.bytes_hit += access.bytes;
  if (access.stay >= 0) {
    StayState& stay = methods_[method_].stays[access.stay];
    Progress& progress = methods_[method_].progress[access.stay];
    if (progress.issued != stay.copies.size())
      throw CoreError(Failure::usage, "the plan issues " + std::to_string(progress.issued) + " of " +
                                          std::to_string(stay.copies.size()) + " copies for access " +
                                          std::to_string(access.number) + " before it is fetched");
    if (progress.unread) {
      await_copies(stay, progress);
      // In most launches of a graph the run before has already read it.
      bool is_hit = progress.before_graph && stay.crosses;
      if (!is_hit) run_.bytes_hit -= plan_.methods[method_].stays[access.stay].bytes;
      progress.unread = false;
    }
  }
  return address_of(access);
}

void PlannedSession::step_ended(int64_t index) {
  MethodState& method = methods_[method_];
  StepState& step = method.steps[index];
  for (int64_t s : step.last_read) {
    method.progress[s].issued = 0;
    if (!poison_) continue;
    for (int64_t c : method.stays[s].copies) poison(plan_.methods[method_].copies[c].piece, compute_);
  }
  if (!step.ended) return;
  if (!capturing_) {
    driver_.record(step.ended, compute_);
    return;
  }
  driver_.record(step.ended_in_graph, compute_);
  step.is_captured = true;
  if (step.seen_outside) driver_.record_external(step.ended, compute_);
}

void PlannedSession::poison(const PieceRecord& piece, Stream stream) {
  driver_.fill(address_of(piece), kPoison, (size_t)piece.bytes, stream);
}

void PlannedSession::end_run() { issue_until((int64_t)plan_.methods[method_].accesses.size()); }

void PlannedSession::reset() noexcept {
  for (MethodState& method : methods_) forget_copies(method);
  // S11: an expert may be in the table but not yet in its slot. If this fails, the next run begins by doing it.
  quietly([&] { empty_tables(); });
  sync_with_retry([&] { driver_.synchronize_stream(copy_stream_); });
  if (!poison_) return;
  // Data that this run copied and nobody read would still be right in the next run, and hide a missing copy.
  quietly([&] {
    for (const MethodRecord& method : plan_.methods)
      for (const CopyRecord& copy : method.copies) poison(copy.piece, copy_stream_);
  });
  quietly([&] {
    for (const BankRecord& bank : plan_.banks)
      for (const BankMemberRecord& member : bank.members)
        driver_.fill(ranges_[member.range].address + (Address)member.range_offset_bytes, kPoison,
                     (size_t)(bank.slots * member.row_bytes), copy_stream_);
  });
  quietly([&] { source_.poison(copy_stream_); });
  sync_with_retry([&] { driver_.synchronize_stream(copy_stream_); });
}

void PlannedSession::forget_copies(MethodState& method) noexcept {
  method.progress.assign(method.stays.size(), {});
}

}  // namespace penstock
