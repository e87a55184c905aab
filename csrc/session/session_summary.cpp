// Puts a plan, its budget and its link into one line.
#include "session/session_summary.h"

#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "open/budget_choice.h"
#include "open/byte_text.h"

namespace penstock {
namespace {

int64_t sum_of(const std::vector<int64_t>& amounts) {
  int64_t sum = 0;
  for (int64_t amount : amounts) sum += amount;
  return sum;
}

// Bytes of all weights that are read, each once. A session may know of more: those of delegates with another session.
int64_t read_bytes(const Engine& over) {
  if (over.lru) return sum_of(over.weight_bytes);
  std::set<int64_t> read;
  for (const MethodRecord& method : over.planned->plan().methods)
    for (const AccessRecord& access : method.accesses) read.insert(access.weight);
  int64_t bytes = 0;
  for (int64_t weight : read) bytes += over.weight_bytes[(size_t)weight];
  return bytes;
}

// Device memory that copies overwrite; all other memory keeps its content.
int64_t ring_bytes(const PlanRecord& plan) {
  std::set<int64_t> ring;
  for (const MethodRecord& method : plan.methods)
    for (const CopyRecord& copy : method.copies) {
      int64_t at = 0;
      for (int64_t block : plan.ranges[(size_t)copy.piece.range].blocks) {
        const int64_t end = at + plan.block_bytes[(size_t)block];
        if (at < copy.piece.range_offset_bytes + copy.piece.bytes && end > copy.piece.range_offset_bytes)
          ring.insert(block);
        at = end;
      }
    }
  int64_t bytes = 0;
  for (int64_t block : ring) bytes += plan.block_bytes[(size_t)block];
  return bytes;
}

// Every weight once, however many accesses read it.
void add_in_place(const PlanRecord& plan, const std::vector<int64_t>& weight_bytes, std::vector<std::string>& parts) {
  std::set<int64_t> whole;
  std::map<int64_t, int64_t> rests;
  for (const MethodRecord& method : plan.methods)
    for (const AccessRecord& access : method.accesses) {
      if (access.range == kDirect && access.bank < 0) whole.insert(access.weight);
      if (access.is_split()) rests[access.weight] = access.in_place_bytes();
    }
  int64_t whole_bytes = 0, rest_bytes = 0, split_bytes = 0;
  for (int64_t weight : whole) whole_bytes += weight_bytes[(size_t)weight];
  for (const auto& [weight, bytes] : rests) {
    rest_bytes += bytes;
    split_bytes += weight_bytes[(size_t)weight];
  }
  if (!whole.empty()) parts.push_back(format_bytes(whole_bytes) + " read in place");
  if (!rests.empty())
    parts.push_back(format_bytes(rest_bytes) + " of " + format_bytes(split_bytes) + " of split weights read in place");
}

void add_experts(const PlanRecord& plan, std::vector<std::string>& parts) {
  if (plan.banks.empty()) return;
  int64_t least = INT64_MAX, most = 0, experts = 0, bytes = 0;
  for (const BankRecord& bank : plan.banks) {
    least = std::min(least, bank.slots);
    most = std::max(most, bank.slots);
    experts = std::max(experts, bank.experts);
    for (const BankMemberRecord& member : bank.members) bytes += bank.slots * member.row_bytes;
  }
  const std::string some = std::to_string(least) + (least == most ? "" : " to " + std::to_string(most));
  parts.push_back("slots for " + some + " of " + std::to_string(experts) + " experts in " +
                  std::to_string(plan.banks.size()) + " layers (" + format_bytes(bytes) + ")");
}

void add_plan(Engine& over, const PenstockSummary& asked, std::vector<std::string>& parts) {
  const PlanRecord& plan = over.planned->plan();
  const int64_t ring = ring_bytes(plan);
  parts.push_back("resident " + format_bytes(sum_of(plan.block_bytes) - ring));
  parts.push_back("ring " + format_bytes(ring));
  if (asked.copying_bytes > asked.budget_bytes)
    parts.push_back("read over the link because copying needs " + format_bytes(asked.copying_bytes));
  add_experts(plan, parts);
  add_in_place(plan, over.weight_bytes, parts);
  if (!plan.stores.empty()) {
    int64_t unpacked = 0, held = 0;
    for (const StoreRecord& store : plan.stores) {
      unpacked += store.piece.bytes;
      held += store.room_bytes;
    }
    parts.push_back(format_bytes(unpacked) + " of weights stay packed in " + format_bytes(held));
  }
  for (size_t m = 0; m < plan.methods.size(); ++m) {
    int64_t streamed = 0;
    for (const CopyRecord& copy : plan.methods[m].copies) streamed += over.source->link_bytes(copy.piece);
    const std::string name = (int64_t)m < asked.method_count ? asked.methods[m] : "method " + std::to_string(m);
    parts.push_back("streamed " + format_bytes(streamed) + " per run of " + name);
  }
}

// In GB/s, rounded half up, without a float: the process's locale may print floats with a comma.
std::string rate_text(const LinkRecord& sample) {
  const auto tenths = (int64_t)(((__int128)sample.bytes * 20 + sample.ns) / ((__int128)sample.ns * 2));
  return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10);
}

std::string link_text(const std::vector<LinkRecord>& samples) {
  std::vector<LinkRecord> timed;
  std::copy_if(samples.begin(), samples.end(), std::back_inserter(timed), [](const LinkRecord& one) { return one.ns; });
  if (timed.empty()) return "no copies";
  std::string sizes;
  for (size_t i = 1; i < timed.size(); ++i)
    sizes += (i > 1 ? ", " : "") + format_bytes(timed[i].bytes / timed[i].copies) + ": " + rate_text(timed[i]);
  return "copies at " + rate_text(timed.front()) + " GB/s" + (sizes.empty() ? "" : " (" + sizes + ")");
}

}  // namespace

std::string session_summary(Engine& over, const PenstockSummary& asked) {
  std::vector<std::string> parts{"floor " + format_bytes(asked.floor_bytes),
                                 "budget " + format_bytes(asked.budget_bytes) + " of " +
                                   format_bytes(read_bytes(over)) + " (" + origin_text(asked.origin) + ")"};
  if (over.planned) add_plan(over, asked, parts);
  else parts.push_back("policy lru");
  parts.insert(parts.end(), asked.remarks, asked.remarks + asked.remark_count);
  parts.push_back(link_text(over.session().link()));
  std::string line = std::string(asked.name) + " on " + asked.device + ": ";
  for (size_t i = 0; i < parts.size(); ++i) line += (i ? ", " : "") + parts[i];
  return line;
}

}  // namespace penstock
