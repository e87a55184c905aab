// Makes the same decisions as the kernels; tests compare both, word for word.
#include "experts/expert_calls.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "driver/driver.h"
#include "host/fault_guard.h"

namespace penstock {
namespace {

unsigned char* bytes(unsigned long long address) { return reinterpret_cast<unsigned char*>(address); }

struct Table {
  Table(unsigned char* at, int experts, int slots) : layout(table_layout(experts, slots)), experts(experts), at(at) {}

  unsigned* words(unsigned offset) const { return reinterpret_cast<unsigned*>(at + offset); }
  ExpertCounts& counts() const { return *reinterpret_cast<ExpertCounts*>(at); }
  unsigned& calls() const { return *words(layout.calls); }
  unsigned& found_count() const { return *words(layout.found_count); }
  unsigned& logged() const { return *words(layout.logged); }
  unsigned* slot_of() const { return words(layout.slot_of); }
  unsigned* uses() const { return words(layout.uses); }
  unsigned* last() const { return words(layout.last); }
  unsigned* source() const { return words(layout.source); }
  unsigned* found() const { return words(layout.found); }
  unsigned* owner() const { return words(layout.owner); }
  unsigned* log(unsigned call) const { return words(layout.log) + (size_t)(call % kLogCalls) * log_words(experts); }

  const TableLayout layout;
  const int experts;
  unsigned char* const at;
};

int64_t expert_at(const ChooseCall& call, int row) {
  int64_t expert;
  std::memcpy(&expert, bytes(call.index) + (size_t)row * sizeof expert, sizeof expert);
  const int64_t wrapped = expert < 0 ? expert + call.experts : expert;
  if (wrapped < 0 || wrapped >= call.experts)
    throw CoreError(Failure::kernel, "index " + std::to_string(expert) + " is out of range for " +
                                         std::to_string(call.experts) + " experts");
  return wrapped;
}

int rows_of(unsigned long long ends, int expert) {
  const auto* all = reinterpret_cast<const int32_t*>(ends);
  return all[expert] - (expert ? all[expert - 1] : 0);
}

void take(const Table& table, unsigned expert, unsigned slot) {
  if (unsigned before = table.owner()[slot]) table.slot_of()[before - 1] = 0;
  table.owner()[slot] = expert + 1;
  table.slot_of()[expert] = slot + 1;
  table.source()[expert] = kFirstSlot + 2 * slot + 1;
}

// By index: every requested expert gets a slot, as long as there is one whose expert is not requested.
void admit_all(const Table& table, int slots, unsigned now) {
  for (unsigned i = 0; i < table.found_count(); ++i) {
    const unsigned expert = table.found()[i];
    if (table.source()[expert] != kReadWhole) continue;
    int best = -1;
    unsigned long long least = ~0ull;
    for (int slot = 0; slot < slots && best < 0; ++slot)
      if (!table.owner()[slot]) best = slot;
    for (int slot = 0; slot < slots && (best < 0 || table.owner()[best]); ++slot) {
      const unsigned held = table.owner()[slot] - 1;
      if (table.source()[held] != kNotWanted) continue;
      const unsigned long long key = priority(table.uses()[held], table.last()[held], now);
      if (key < least) least = key, best = slot;
    }
    if (best >= 0) take(table, expert, (unsigned)best);
  }
}

// By ends: no expert is replaced. Empty slots go to the experts with the most rows.
void admit_most(const Table& table, const ChooseCall& call, unsigned now) {
  for (int slot = 0; slot < call.slots; ++slot) {
    if (table.owner()[slot]) continue;
    int best = -1, most = 0;
    for (int expert = 0; expert < call.experts; ++expert)
      if (table.source()[expert] == kReadWhole && rows_of(call.index, expert) > most)
        most = rows_of(call.index, expert), best = expert;
    if (best < 0) return;
    take(table, (unsigned)best, (unsigned)slot);
    table.uses()[best] = kUseWeight * std::min((unsigned)most, kMostUsesACall);
    table.last()[best] = now;
  }
}

}  // namespace

void choose_experts(const ChooseCall& call) {
  Table table(bytes(call.table), call.experts, call.slots);
  std::vector<unsigned char> wanted((size_t)call.experts);
  if (call.by_ends) {
    for (int expert = 0; expert < call.experts; ++expert) wanted[(size_t)expert] = rows_of(call.index, expert) > 0;
  } else {
    for (int row = 0; row < call.rows; ++row) wanted[(size_t)expert_at(call, row)] = 1;
  }
  const unsigned now = ++table.calls();
  unsigned hits = 0;
  table.found_count() = 0;
  for (int expert = 0; expert < call.experts; ++expert) {
    table.source()[expert] = kNotWanted;
    if (!wanted[(size_t)expert]) continue;
    table.found()[table.found_count()++] = (unsigned)expert;
    const unsigned slot = table.slot_of()[expert];
    hits += slot != 0;
    table.source()[expert] = slot ? kFirstSlot + 2 * (slot - 1) : kReadWhole;
    if (call.by_ends) continue;
    table.uses()[expert] = decayed(table.uses()[expert], table.last()[expert], now) + kUseWeight;
    table.last()[expert] = now;
  }
  if (call.by_ends) {
    admit_most(table, call, now);
  } else {
    admit_all(table, call.slots, now);
    unsigned* log = table.log(table.logged()++);
    std::fill_n(log, log_words(call.experts), 0u);
    for (int expert = 0; expert < call.experts; ++expert)
      log[expert / 32] |= (unsigned)wanted[(size_t)expert] << (expert % 32);
  }
  ExpertCounts& counts = table.counts();
  if (call.begins_run) counts.run_hits = counts.run_misses = 0;
  const unsigned misses = table.found_count() - hits;
  counts.calls++;
  counts.hits += hits;
  counts.misses += misses;
  counts.run_hits += hits;
  counts.run_misses += misses;
}

void move_experts(const MoveCall& call) {
  const auto row_bytes = (size_t)call.row_bytes;
  // The file may have been truncated.
  auto copy = [&](void* to, const unsigned char* from) {
    if (!guarded_copy(to, from, row_bytes))
      throw DriverError(Failure::host_read, "soft move_experts", EFAULT,
                        "an expert of " + std::to_string(row_bytes) + " bytes could not be read");
  };
  auto from = [&](unsigned expert) -> const unsigned char* {
    const unsigned char* whole = bytes(call.whole) + (size_t)expert * row_bytes;
    if (!call.table) return whole;
    const Table table(bytes(call.table), call.experts, call.slots);
    const unsigned source = table.source()[expert];
    if (source < kFirstSlot) return whole;
    unsigned char* slot = bytes(call.slots_at) + (size_t)((source - kFirstSlot) / 2) * row_bytes;
    // Filling the slot once is enough; filling it again writes the same bytes.
    if ((source - kFirstSlot) % 2) copy(slot, whole);
    return slot;
  };
  if (call.by_ends) {
    for (int expert = call.first; expert < call.end; ++expert)
      if (rows_of(call.index, expert) > 0)
        copy(bytes(call.out) + (size_t)(expert - call.first) * row_bytes, from((unsigned)expert));
    return;
  }
  ChooseCall rows{};
  rows.index = call.index;
  rows.experts = call.experts;
  for (int row = 0; row < call.rows; ++row)
    copy(bytes(call.out) + (size_t)row * row_bytes, from((unsigned)expert_at(rows, row)));
}

HitRate logged_hits(const unsigned char* at, int experts, int slots, int wanted_slots) {
  const Table logged(const_cast<unsigned char*>(at), experts, slots);
  const unsigned count = std::min(logged.logged(), kLogCalls), first = logged.logged() - count;
  std::vector<unsigned char> memory(table_layout(experts, wanted_slots).bytes);
  Table table(memory.data(), experts, wanted_slots);
  HitRate found{0, 0, count - count / 4};
  for (unsigned call = first; call < first + count; ++call) {
    std::vector<int64_t> index;
    for (int expert = 0; expert < experts; ++expert)
      if (logged.log(call)[expert / 32] >> (expert % 32) & 1) index.push_back(expert);
    const ExpertCounts before = table.counts();
    choose_experts({reinterpret_cast<unsigned long long>(memory.data()),
                    reinterpret_cast<unsigned long long>(index.data()), experts, wanted_slots, (int)index.size(), 0, 0});
    if (call - first < count / 4) continue;
    found.hits += (int64_t)(table.counts().hits - before.hits);
    found.uses += (int64_t)index.size();
  }
  return found;
}

}  // namespace penstock
