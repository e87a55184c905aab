// The table of a bank: which experts are in its slots, how often each was asked for, and what the last call found. It lies
// in device memory beside the slots and is read and written by kernels alone (experts.cu); expert_calls.cpp does the same
// on the CPU. All zeros is an empty table.
//
// Experts are rows of stacked weights that are taken by index. A bank is the weights whose rows are taken by one index:
// an expert lies in the same slot of all of them.
#pragma once

namespace penstock {

// Rows of a weight that is a bank's. More are a table of words, not of experts.
constexpr int kMostExperts = 4096;
// Kernels copy sixteen bytes at a time.
constexpr int kExpertUnitBytes = 16;
// Rows that one move takes; a session makes several of more.
constexpr int kMostRowsAMove = 4096;

// After so many calls a use counts half. Measured against other rules: docs/experts.md.
constexpr unsigned kHalvingCalls = 64;
constexpr unsigned kUseWeight = 1u << 12;
// What an expert counts that many rows of one call ask for, in uses at the most.
constexpr unsigned kMostUsesACall = 15;

// What the last calls asked for: the hit rate with any number of slots follows from it.
constexpr unsigned kLogCalls = 256;

// How a call finds an expert: not asked for, where the weight lies as a whole, in a slot, or there and to be put into a slot.
constexpr unsigned kNotWanted = 0;
constexpr unsigned kReadWhole = 1;
constexpr unsigned kFirstSlot = 2;  // + 2 * slot, and 1 more if the slot is still to be filled

// At the head of a table. Since the plan was installed; what begins with run_ since the run began.
struct ExpertCounts {
  unsigned long long calls;
  unsigned long long hits;
  unsigned long long misses;  // whose bytes crossed the link
  unsigned long long run_hits;
  unsigned long long run_misses;
  unsigned long long spare[3];
};

// Where in the table each array begins, in bytes.
struct TableLayout {
  unsigned calls;   // one number: since the table was empty
  unsigned found_count;
  unsigned logged;   // another: calls by index since then
  unsigned slot_of;  // by expert: its slot and 1, or 0
  unsigned uses;     // by expert: decayed, as of its last use
  unsigned last;     // by expert: the call that used it last
  unsigned source;   // by expert, of the last call
  unsigned found;    // the experts that the last call asked for, in rising order
  unsigned owner;    // by slot: its expert and 1, or 0
  unsigned log;      // by call by index, log_words of 32 bits: a bit for each expert that it asked for
  unsigned bytes;
};

#ifdef __CUDACC__
#define PENSTOCK_BOTH __host__ __device__
#else
#define PENSTOCK_BOTH
#endif

PENSTOCK_BOTH inline unsigned log_words(int experts) { return ((unsigned)experts + 31) / 32; }

PENSTOCK_BOTH inline TableLayout table_layout(int experts, int slots) {
  TableLayout at{};
  const unsigned words = 4u * (unsigned)experts;
  at.calls = (unsigned)sizeof(ExpertCounts);
  at.found_count = at.calls + 4;
  at.logged = at.calls + 8;
  at.slot_of = at.calls + 16;
  at.uses = at.slot_of + words;
  at.last = at.uses + words;
  at.source = at.last + words;
  at.found = at.source + words;
  at.owner = at.found + words;
  at.log = at.owner + 4u * (unsigned)slots;
  at.bytes = at.log + kLogCalls * log_words(experts) * 4;
  return at;
}

// What an expert counts now. Calls are grouped by kHalvingCalls; between two groups everything counts half.
PENSTOCK_BOTH inline unsigned decayed(unsigned uses, unsigned last, unsigned now) {
  const unsigned halvings = now / kHalvingCalls - last / kHalvingCalls;
  return halvings > 31 ? 0 : uses >> halvings;
}

// The least is replaced first: of experts that count alike the one that was used longest ago.
PENSTOCK_BOTH inline unsigned long long priority(unsigned uses, unsigned last, unsigned now) {
  return (unsigned long long)decayed(uses, last, now) << 32 | last;
}

// Which experts are asked for, and where each is found from now on. By index: the experts of so many rows, 64 bits each.
// By ends: where the rows of each expert end, 32 bits each, as a grouped product has them.
struct ChooseCall {
  unsigned long long table;
  unsigned long long index;  // or ends
  int experts;
  int slots;
  int rows;  // by ends: one for each expert
  int by_ends;
  int begins_run;
};

// Rows to a place of their own: by index one for each number, by ends those of experts [first, end) that have rows.
struct MoveCall {
  unsigned long long table;  // 0: there is none, and everything is read where it lies as a whole
  unsigned long long index;
  unsigned long long whole;  // all experts, one after the other
  unsigned long long slots_at;
  unsigned long long out;
  long long row_bytes;
  int experts;
  int slots;
  int rows;
  int by_ends;
  int first;
  int end;
};

// Rows of a grouped product, `to` and `from` of row_bytes each: those of experts [first, end), brought to the beginning, with
// the ends counted from there; or put back.
struct ShiftCall {
  unsigned long long to;
  unsigned long long from;
  unsigned long long ends;
  unsigned long long ends_out;  // 0: rows are put back
  long long row_bytes;
  int rows;
  int first;
  int end;
};

}  // namespace penstock
