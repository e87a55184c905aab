// Reads delegate refs and payloads, and verifies their checksums.
#include "payload.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "core.h"
#include "load_error.h"
#include "penstock_records.h"

namespace penstock_executorch {
namespace {

struct Header {
  char magic[8];
  uint64_t version;
  uint64_t checksum;
  uint64_t record_bytes;
  uint64_t plans_bytes;
  uint64_t code_bytes;
};
constexpr size_t kSealedFrom = 24;

[[noreturn]] void refuse(const std::string& text) { throw LoadError(Kind::package, text); }

const char* const kLowerAgain = "lower it again, with penstock.executorch.export or with CudaPartitioner";
const char* const kPackAgain = "pack the weights again: penstock unpack, and then penstock pack --program with the .pte";

// The header, checked; the parts follow it one after the other.
Header opened(const void* data, size_t bytes, const char* magic, const char* what, const char* remedy = kLowerAgain) {
  Header header;
  if (!data || bytes < sizeof header)
    refuse(std::string(what) + " has " + std::to_string(bytes) + " bytes, its header needs " +
           std::to_string(sizeof header));
  std::memcpy(&header, data, sizeof header);
  if (std::memcmp(header.magic, magic, sizeof header.magic) != 0)
    refuse(std::string(what) + " does not begin as one does: it was not written by Penstock");
  if (header.version != (uint64_t)penstock::kRecordVersion)
    refuse(std::string(what) + " has format version " + std::to_string(header.version) +
           ", and this release reads version " + std::to_string(penstock::kRecordVersion) + ": " + remedy);
  size_t left = bytes - sizeof header;
  for (uint64_t part : {header.record_bytes, header.plans_bytes, header.code_bytes}) {
    if (part > left) refuse(std::string(what) + " is truncated: it has " + std::to_string(bytes) + " bytes");
    left -= part;
  }
  if (left) refuse(std::string(what) + " has " + std::to_string(left) + " bytes too many");
  const char* start = static_cast<const char*>(data);
  if (core().checksum(start + kSealedFrom, (int64_t)(bytes - kSealedFrom)) != header.checksum)
    refuse(std::string(what) + " is damaged: its bytes do not have the checksum that its header names");
  return header;
}

// The plans of all tables follow one another. Checks that each is the one that was proved and written here.
void find_plans(std::vector<PlanTable>& tables, const char* at, size_t bytes, const char* whose = "the program") {
  const char* end = at + bytes;
  for (PlanTable& table : tables)
    for (size_t i = 0; i < table.plans.size(); ++i) {
      StoredPlan& plan = table.plans[i];
      if (plan.count > (size_t)(end - at) / sizeof(int64_t)) refuse(std::string("the plans of ") + whose + " are truncated");
      plan.numbers = at;
      at += plan.count * sizeof(int64_t);
      if (core().checksum(plan.numbers, at - plan.numbers) != plan.seal)
        refuse("plan " + std::to_string(i + 1) + " of " + std::to_string(table.plans.size()) + " for methods " +
               listed(table.methods) +
               " is not the one that was written: its numbers do not have the checksum that the description names");
    }
  if (at != end) refuse(std::string(whose) + " holds plans that its description does not list");
}

constexpr int64_t kMostSlotsBytes = 24 << 20;
constexpr int64_t kSlotsPartOfPlan = 32;
constexpr int64_t kSlotAlignmentBytes = 256;

// At least two slots that hold a block each: one is filled while the other is decoded.
Slots slots_of(int64_t wanted_bytes, int64_t page_bytes, int64_t block_bytes) {
  auto whole = [](int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; };
  const int64_t least_bytes = whole(2 * whole(block_bytes, kSlotAlignmentBytes), page_bytes);
  const int64_t total_bytes = std::max(std::min(kMostSlotsBytes, wanted_bytes) / page_bytes * page_bytes, least_bytes);
  const int64_t count = total_bytes / 3 / kSlotAlignmentBytes * kSlotAlignmentBytes >= block_bytes ? 3 : 2;
  return {count, total_bytes / count / kSlotAlignmentBytes * kSlotAlignmentBytes, total_bytes};
}

// The same plans for packed weights: every copy passes through slots. Nothing if a packed weight is read in place.
std::optional<PlanTable> with_slots(PlanTable table, const Payload& payload, const PackedWeights& packed) {
  for (int64_t weight : table.in_place)
    if (packed.weights.count(weight)) return std::nullopt;
  const Slots least = slots_of(0, payload.page_bytes, packed.largest_block_bytes);
  for (size_t i = 0; i < table.plans.size(); ++i) {
    StoredPlan& plan = table.plans[i];
    // With everything resident, packed weights are decoded once, on the host.
    if (!plan.is_copying) continue;
    // The first is for the floor.
    plan.slots = i == 0 ? least : slots_of(plan.device_bytes / kSlotsPartOfPlan, payload.page_bytes,
                                           packed.largest_block_bytes);
    plan.device_bytes += plan.slots.total_bytes;
  }
  if (table.plans.front().slots.count && table.floor_bytes < table.full_bytes)
    table.floor_bytes = std::min(table.full_bytes, table.floor_bytes + least.total_bytes);
  return table;
}

}  // namespace

DelegateRef read_delegate_ref(const void* data, size_t bytes) {
  const char* what = "the delegate's blob";
  Header header = opened(data, bytes, "PNSTKDLG", what);
  try {
    penstock::RecordReader in(static_cast<const char*>(data) + sizeof header, header.record_bytes / sizeof(int64_t), what);
    DelegateRef found{in.text(), in.text(), in.next()};
    in.finish();
    return found;
  } catch (const penstock::RecordError& error) {
    refuse(error.what());
  }
}

Payload read_payload(const void* data, size_t bytes) {
  Header header = opened(data, bytes, "PNSTKPRG", "the program");
  const char* start = static_cast<const char*>(data) + sizeof header;
  Payload out{read_description(start, header.record_bytes), {}, start, header.record_bytes, nullptr, header.code_bytes};
  find_plans(out.plan_tables, start + header.record_bytes, header.plans_bytes);
  out.code = start + header.record_bytes + header.plans_bytes;
  return out;
}

std::string packed_plans_key(const Payload& payload) { return "penstock.plans." + payload.program; }

std::vector<PlanTable> read_packed_plans(const void* data, size_t bytes, const Payload& payload,
                                         const PackedWeights& packed) {
  const std::string what = "entry '" + packed_plans_key(payload) + "' of the weights file";
  try {
    Header header = opened(data, bytes, "PNSTKPLN", what.c_str(), kPackAgain);
    const char* start = static_cast<const char*>(data) + sizeof header;
    penstock::RecordReader in(start, header.record_bytes / sizeof(int64_t), what.c_str());
    const std::string program = in.text();
    const auto seal = (uint64_t)in.next();
    std::vector<PlanTable> tables = read_plan_tables(in, payload.methods.size(), payload.weights.size());
    in.finish();
    if (program != payload.program) refuse(what + " is for program " + program);
    if (tables.empty()) refuse(what + " holds no plans");
    if (seal != core().checksum(packed.numbers.data(), (int64_t)(packed.numbers.size() * sizeof(int64_t))))
      refuse(what + " is for other packed weights than the file has: " + kPackAgain);
    find_plans(tables, start + header.record_bytes, header.plans_bytes, what.c_str());
    return tables;
  } catch (const LoadError& error) {
    throw LoadError(Kind::weights_file, error.what());
  } catch (const penstock::RecordError& error) {
    throw LoadError(Kind::weights_file, error.what());
  }
}

PlanTable find_plan_table(const Payload& payload, const std::vector<int64_t>& methods, bool staged,
                          const PackedWeights& packed) {
  const bool is_planned = !packed.plan_tables.empty();
  for (const PlanTable& table : is_planned ? packed.plan_tables : payload.plan_tables) {
    if (table.methods != methods || (staged && !table.in_place.empty())) continue;
    if (packed.weights.empty() || is_planned) return table;
    if (std::optional<PlanTable> found = with_slots(table, payload, packed)) return *found;
  }
  refuse("the program holds no plans for methods " + listed(methods) +
         (staged || !packed.weights.empty() ? " without reading in place" : ""));
}

ReadyPlan ready(const StoredPlan& plan) {
  ReadyPlan made{plan.device_bytes, std::vector<int64_t>(plan.count), plan.slots};
  std::memcpy(made.numbers.data(), plan.numbers, plan.count * sizeof(int64_t));
  return made;
}

}  // namespace penstock_executorch
