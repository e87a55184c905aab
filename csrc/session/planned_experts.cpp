// Experts taken by index, under a plan that reads them in host memory and keeps some in slots. The device decides what
// is in which slot, in the order of the compute stream. So what a kernel reads is there before it runs (S2) and is
// overwritten only after it (S1), without any event.
#include <algorithm>
#include <cstring>

#include "abi/torch_abi.h"
#include "experts/expert_operands.h"
#include "session/planned_session.h"

namespace penstock {
namespace {

// How many bytes of matrices a grouped product gets at once.
constexpr int64_t kRoomBytes = 64 << 20;

}  // namespace

Address PlannedSession::table_of(int64_t bank) const {
  const BankRecord& record = plan_.banks[(size_t)bank];
  return ranges_[(size_t)record.range].address + (Address)record.range_offset_bytes;
}

void PlannedSession::prepare_experts() {
  const auto reads_experts = [](const AccessRecord& access) { return access.reads_experts(); };
  for (const MethodRecord& method : plan_.methods)
    if (std::any_of(method.accesses.begin(), method.accesses.end(), reads_experts)) {
      // This loads kernels, which cannot happen inside a graph.
      driver_.prepare_experts();
      break;
    }
  empty_tables();
}

void PlannedSession::empty_tables() {
  must_empty_tables_ = true;
  for (size_t b = 0; b < plan_.banks.size(); ++b) {
    const TableLayout layout = table_layout((int)plan_.banks[b].experts, (int)plan_.banks[b].slots);
    // Counts are kept, except for a new plan: its fresh memory holds poison, which this overwrites.
    const size_t kept = has_tables_ ? sizeof(ExpertCounts) : 0;
    driver_.fill(table_of((int64_t)b) + kept, 0, layout.bytes - kept, copy_stream_);
  }
  has_tables_ = true;
  must_empty_tables_ = false;
}

void PlannedSession::begin_choices() {
  chosen_from_.assign(plan_.banks.size(), false);
  chosen_at_.clear();
}

void PlannedSession::begin_tables() {
  begin_choices();
  if (!must_empty_tables_) return;
  empty_tables();
  driver_.synchronize_stream(copy_stream_);
}

void PlannedSession::choose(const AccessRecord& access, Address index, int64_t rows, bool by_ends) {
  const auto bank = (size_t)access.bank;
  // A second choice would find the experts of the first in their slots, which other weights have not filled yet (S11).
  if (!chosen_at_.insert(access.number).second)
    throw CoreError(Failure::divergence, "access " + std::to_string(access.number) + " asks for experts twice in a run");
  ChooseCall call{};
  call.table = table_of(access.bank);
  call.index = index;
  call.experts = (int)plan_.banks[bank].experts;
  call.slots = (int)plan_.banks[bank].slots;
  call.rows = (int)rows;
  call.by_ends = by_ends;
  call.begins_run = !chosen_from_[bank];
  chosen_from_[bank] = true;
  driver_.choose_experts(call, compute_);
}

MoveCall PlannedSession::move_of(int64_t position, int64_t experts, int64_t row_bytes, Address index,
                                 int64_t rows) const {
  const AccessRecord& access = plan_.methods[(size_t)method_].accesses[(size_t)position];
  if (experts < 1 || access.bytes % experts || access.bytes / experts != row_bytes ||
      (access.bank >= 0 && plan_.banks[(size_t)access.bank].experts != experts))
    throw CoreError(Failure::divergence, "access " + std::to_string(access.number) + " reads " +
                                             std::to_string(experts) + " experts of " + std::to_string(row_bytes) +
                                             " bytes; the plan has others");
  MoveCall call{};
  call.index = index;
  call.whole = methods_[(size_t)method_].in_place[(size_t)position];
  call.row_bytes = row_bytes;
  call.experts = (int)experts;
  call.rows = (int)rows;
  if (access.bank < 0) return call;
  const BankRecord& bank = plan_.banks[(size_t)access.bank];
  const BankMemberRecord& member = bank.members[access.member];
  call.table = table_of(access.bank);
  call.slots_at = ranges_[(size_t)member.range].address + (Address)member.range_offset_bytes;
  call.slots = (int)bank.slots;
  return call;
}

void PlannedSession::take_rows(int64_t position, int64_t experts, int64_t row_bytes, Address index, int64_t rows,
                               Address out) {
  const AccessRecord& access = plan_.methods[(size_t)method_].accesses[(size_t)position];
  MoveCall call = move_of(position, experts, row_bytes, index, rows);
  if (access.chooses) choose(access, index, rows, false);
  // A slot that one move fills may be filled again by the next, with the same bytes.
  for (int64_t done = 0; done < rows; done += kMostRowsAMove) {
    call.index = index + (Address)(done * (int64_t)sizeof(int64_t));
    call.rows = (int)std::min<int64_t>(rows - done, kMostRowsAMove);
    call.out = out + (Address)(done * row_bytes);
    driver_.move_experts(call, compute_);
  }
}

bool PlannedSession::take_rows(int64_t number, Address index, int64_t rows, Address out) {
  return attempt([&] {
    const int64_t position = fetched_position(number);
    const AccessRecord& access = plan_.methods[(size_t)method_].accesses[(size_t)position];
    if (access.bank < 0) throw CoreError(Failure::usage, "access " + std::to_string(number) + " has no slots");
    const int64_t experts = plan_.banks[(size_t)access.bank].experts;
    take_rows(position, experts, access.bytes / experts, index, rows, out);
  });
}

void PlannedSession::take_rows(const RowsRequest& request, TensorHandle* out) {
  const int64_t position = fetched_position(request.access);
  if (plan_.methods[(size_t)method_].accesses[(size_t)position].range != kDirect) return Session::take_rows(request, out);
  RowsOperands operands(request);
  take_rows(position, operands.experts(), operands.row_bytes(), operands.index(), operands.rows(), operands.out());
  *out = operands.release_result();
}

void PlannedSession::multiply_groups(const GroupedRequest& request, TensorHandle* out) {
  const int64_t position = fetched_position(request.access);
  const AccessRecord& access = plan_.methods[(size_t)method_].accesses[(size_t)position];
  if (access.range != kDirect) return Session::multiply_groups(request, out);
  GroupedOperands operands(request);
  if (operands.on_cpu() && compute_)
    throw CoreError(Failure::usage, "the experts of access " + std::to_string(access.number) +
                                        " were asked for on a stream, and the calling thread multiplies with them");
  const int64_t experts = operands.experts(), row_bytes = operands.row_bytes();
  const Address ends = operands.ends();
  MoveCall call = move_of(position, experts, row_bytes, ends, experts);
  call.by_ends = 1;
  if (access.chooses) choose(access, ends, experts, true);
  const int64_t at_once = std::clamp<int64_t>(kRoomBytes / row_bytes, 1, experts);
  // With no rows there is nothing to multiply, but choose() still had to reset the counts of the run before. And what
  // it entered must come into slots (S11): ends that are wrong name experts all the same.
  for (int64_t first = 0; (operands.rows() || access.bank >= 0) && first < experts; first += at_once) {
    const int64_t end = std::min(first + at_once, experts);
    call.first = (int)first;
    call.end = (int)end;
    call.out = operands.room(first, end);
    driver_.move_experts(call, compute_);
    if (!operands.rows()) continue;
    operands.multiply(first, end, [&](Address to, Address from, Address ends_out, int64_t shifted_bytes) {
      ShiftCall shift{};
      shift.to = to;
      shift.from = from;
      shift.ends = ends;
      shift.ends_out = ends_out;
      shift.row_bytes = shifted_bytes;
      shift.rows = (int)operands.rows();
      shift.first = (int)first;
      shift.end = (int)end;
      driver_.shift_rows(shift, compute_);
    });
  }
  *out = operands.release_result();
}

const std::vector<unsigned char>& PlannedSession::table_now(int64_t bank) {
  const BankRecord& record = plan_.banks[(size_t)bank];
  drain();
  read_back_.resize(table_layout((int)record.experts, (int)record.slots).bytes);
  driver_.copy_to_host(read_back_.data(), table_of(bank), read_back_.size(), copy_stream_);
  driver_.synchronize_stream(copy_stream_);
  return read_back_;
}

std::vector<ExpertCounts> PlannedSession::counts_now() {
  std::vector<ExpertCounts> counts(plan_.banks.size());
  if (counts.empty()) return counts;
  drain();
  read_back_.resize(counts.size() * sizeof(ExpertCounts));
  for (size_t b = 0; b < counts.size(); ++b)
    driver_.copy_to_host(read_back_.data() + b * sizeof(ExpertCounts), table_of((int64_t)b), sizeof(ExpertCounts),
                         copy_stream_);
  driver_.synchronize_stream(copy_stream_);
  std::memcpy(counts.data(), read_back_.data(), read_back_.size());
  return counts;
}

std::vector<ExpertCountsRecord> PlannedSession::expert_counts() {
  std::vector<ExpertCountsRecord> found;
  for (const ExpertCounts& counts : counts_now())
    found.push_back({(int64_t)counts.calls, (int64_t)counts.hits, (int64_t)counts.misses});
  return found;
}

std::vector<HitRate> PlannedSession::logged_hits(int64_t bank, const std::vector<int64_t>& slots) {
  if (bank < 0 || bank >= (int64_t)plan_.banks.size())
    throw CoreError(Failure::usage, "there is no bank " + std::to_string(bank));
  const BankRecord& record = plan_.banks[(size_t)bank];
  const std::vector<unsigned char>& table = table_now(bank);
  std::vector<HitRate> found;
  for (int64_t count : slots) {
    if (count < 1 || count > record.experts)
      throw CoreError(Failure::usage, "a bank of " + std::to_string(record.experts) + " experts has no " +
                                          std::to_string(count) + " slots");
    found.push_back(penstock::logged_hits(table.data(), (int)record.experts, (int)record.slots, (int)count));
  }
  return found;
}

bool PlannedSession::uses_bank(int64_t method, size_t bank) const {
  if (method < 0) return false;
  for (const AccessRecord& access : plan_.methods[(size_t)method].accesses)
    if (access.bank == (int64_t)bank) return true;
  return false;
}

void PlannedSession::add_device_counts(Counters* last_run, Counters* totals) {
  const std::vector<ExpertCounts> counts = counts_now();
  auto add = [](Counters* to, uint64_t hits, uint64_t misses, int64_t row_bytes) {
    to->expert_hits += (int64_t)hits;
    to->expert_misses += (int64_t)misses;
    to->expert_bytes += (int64_t)misses * row_bytes;
  };
  for (size_t b = 0; b < counts.size(); ++b) {
    int64_t row_bytes = 0;
    for (const BankMemberRecord& member : plan_.banks[b].members) row_bytes += member.row_bytes;
    add(totals, counts[b].hits, counts[b].misses, row_bytes);
    if (uses_bank(last_method(), b)) add(last_run, counts[b].run_hits, counts[b].run_misses, row_bytes);
  }
  totals->expert_hits += retired_.expert_hits;
  totals->expert_misses += retired_.expert_misses;
  totals->expert_bytes += retired_.expert_bytes;
}

void PlannedSession::retire_expert_counts() {
  if (plan_.banks.empty() || !has_tables_) return;
  Counters unused, all;
  add_device_counts(&unused, &all);
  retired_ = all;
}

}  // namespace penstock
