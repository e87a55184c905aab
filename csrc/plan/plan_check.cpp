// Lays spans of blocks over one another, and checks that every access finds the bytes of its weight.
#include "plan/plan_check.h"

#include <algorithm>
#include <string>
#include <utility>

#include "driver/driver.h"
#include "experts/expert_table.h"

namespace penstock {
namespace {

// The alignment that kernels expect. With smaller pages a range can promise no more than a page.
constexpr int64_t kAlignment = 256;

std::string text(int64_t value) { return std::to_string(value); }

[[noreturn]] void refuse(const std::string& what) { throw CoreError(Failure::usage, "the plan is refused: " + what); }

// A stretch of one block.
struct Span {
  int64_t block;
  int64_t offset;
  int64_t bytes;
  int64_t weight;
  int64_t weight_offset_bytes;
};

class Memory {
 public:
  Memory(const PlanRecord& plan, int64_t page_bytes) : plan_(plan), page_bytes_(page_bytes) {
    for (size_t b = 0; b < plan.block_bytes.size(); ++b)
      if (plan.block_bytes[b] % page_bytes)
        refuse("block " + text((int64_t)b) + " has " + text(plan.block_bytes[b]) + " bytes, a page has " +
               text(page_bytes));
    for (const RangeRecord& range : plan.ranges) begins_.push_back(begins(range));
    streams_.resize(plan.block_bytes.size());
    filled_.resize(plan.block_bytes.size());
    for (const MethodRecord& method : plan.methods)
      for (const CopyRecord& copy : method.copies)
        for (const Span& span : spans(copy.piece)) streams_[(size_t)span.block] = true;
    for (const PieceRecord& piece : plan.fills) fill(piece);
    for (size_t b = 0; b < filled_.size(); ++b) {
      std::vector<Span>& all = filled_[b];
      std::sort(all.begin(), all.end(), [](const Span& one, const Span& other) { return one.offset < other.offset; });
      for (size_t i = 1; i < all.size(); ++i)
        if (all[i - 1].offset + all[i - 1].bytes > all[i].offset)
          refuse("two fills overlap in block " + text((int64_t)b));
    }
  }

  std::vector<Span> spans(const PieceRecord& piece) const {
    const RangeRecord& range = plan_.ranges[(size_t)piece.range];
    const std::vector<int64_t>& begins = begins_[(size_t)piece.range];
    std::vector<Span> found;
    int64_t low = piece.range_offset_bytes, end = low + piece.bytes;
    size_t at = (size_t)(std::upper_bound(begins.begin(), begins.end(), low) - begins.begin());
    for (at -= 1; low < end; ++at) {
      int64_t block = range.blocks[at];
      int64_t high = std::min(end, begins[at] + plan_.block_bytes[(size_t)block]);
      found.push_back({block, low - begins[at], high - low, piece.weight,
                       piece.weight_offset_bytes + low - piece.range_offset_bytes});
      low = high;
    }
    return found;
  }

  bool streams(int64_t block) const { return streams_[(size_t)block]; }

  // Whether these bytes are filled, and with these bytes of the weight.
  bool holds(const Span& span) const {
    for (const Span& filled : filled_[(size_t)span.block])
      if (filled.offset <= span.offset && span.offset + span.bytes <= filled.offset + filled.bytes)
        return filled.weight == span.weight &&
               filled.weight_offset_bytes - filled.offset == span.weight_offset_bytes - span.offset;
    return false;
  }

  void check_ring(const PieceRecord& piece, int64_t weight_bytes, const std::string& what) const {
    int64_t end = piece.range_offset_bytes + piece.bytes;
    bool is_last = piece.weight_offset_bytes + piece.bytes == weight_bytes;
    if (piece.range_offset_bytes % page_bytes_ || (end % page_bytes_ && !is_last))
      refuse(what + " takes bytes " + text(piece.range_offset_bytes) + " to " + text(end) +
             " of its range; it must begin with a page of " + text(page_bytes_) +
             " bytes, and end with one or with its weight");
    for (const Span& span : spans(piece))
      if (plan_.block_bytes[(size_t)span.block] != page_bytes_)
        refuse(what + " goes to block " + text(span.block) + " of " + text(plan_.block_bytes[(size_t)span.block]) +
               " bytes, a ring has pages of " + text(page_bytes_));
  }

  int64_t alignment() const { return page_bytes_ % kAlignment ? page_bytes_ : kAlignment; }

 private:
  std::vector<int64_t> begins(const RangeRecord& range) const {
    std::vector<int64_t> blocks = range.blocks, begins;
    std::sort(blocks.begin(), blocks.end());
    auto twice = std::adjacent_find(blocks.begin(), blocks.end());
    if (twice != blocks.end()) refuse("a range maps block " + text(*twice) + " twice");
    int64_t at = 0;
    for (int64_t block : range.blocks) {
      begins.push_back(at);
      at += plan_.block_bytes[(size_t)block];
    }
    return begins;
  }

  void fill(const PieceRecord& piece) {
    for (const Span& span : spans(piece)) {
      if (streams(span.block)) refuse("a fill goes to block " + text(span.block) + ", which copies go to");
      filled_[(size_t)span.block].push_back(span);
    }
  }

  const PlanRecord& plan_;
  const int64_t page_bytes_;
  std::vector<std::vector<int64_t>> begins_;  // by range: where its blocks begin
  std::vector<bool> streams_;                 // by block: whether copies go there
  std::vector<std::vector<Span>> filled_;     // by block
};

class Method {
 public:
  Method(const MethodRecord& method, const Memory& memory, size_t blocks, int64_t number)
      : method_(method), memory_(memory), what_("method " + text(number) + ", "), holder_(blocks, -1) {
    stays_.resize(method.stays.size());
    std::vector<int64_t> bytes(method.stays.size());
    for (size_t c = 0; c < method.copies.size(); ++c) {
      const CopyRecord& copy = method.copies[c];
      if (c && method.copies[c - 1].issue_before > copy.issue_before)
        refuse(what_ + "copy " + text((int64_t)c) + " is listed out of the order of issue");
      stays_[(size_t)copy.stay].copies.push_back(c);
      // No sum of pieces overflows: each lies in the bytes that the stay has left.
      if (copy.piece.bytes > method.stays[(size_t)copy.stay].bytes - bytes[(size_t)copy.stay])
        refuse(what_ + "copy " + text((int64_t)c) + " is more than stay " + text(copy.stay) + " has");
      bytes[(size_t)copy.stay] += copy.piece.bytes;
      spans_.push_back(memory.spans(copy.piece));
    }
    for (size_t s = 0; s < bytes.size(); ++s)
      if (bytes[s] != method.stays[s].bytes)
        refuse(what_ + "stay " + text((int64_t)s) + " has " + text(method.stays[s].bytes) + " bytes, its copies have " +
               text(bytes[s]));
    std::vector<int64_t> prologue = method.prologue;
    std::sort(prologue.begin(), prologue.end());
    auto twice = std::adjacent_find(prologue.begin(), prologue.end());
    if (twice != prologue.end()) refuse(what_ + "copy " + text(*twice) + " enters twice");
  }

  void check() {
    for (const AccessRecord& access : method_.accesses) check_access(access);
    for (size_t s = 0; s < stays_.size(); ++s)
      if (!stays_[s].is_listed) refuse(what_ + "stay " + text((int64_t)s) + " is read by no access");
    for (int64_t copy : method_.prologue) issue((size_t)copy);
    // A cold run leaves the ring as every later run does, because each issues the same copies.
    for (int run = 0; run < 2; ++run) {
      size_t next = 0;
      for (size_t position = 0; position < method_.accesses.size(); ++position) {
        while (next < method_.copies.size() && method_.copies[next].issue_before <= (int64_t)position) issue(next++);
        if (method_.accesses[position].stay >= 0) read(method_.accesses[position]);
      }
      while (next < method_.copies.size()) issue(next++);
    }
  }

 private:
  struct Stay {
    std::vector<size_t> copies;
    size_t issued = 0;
    bool is_read = false;  // since it was issued
    bool is_listed = false;
  };

  std::string what(const AccessRecord& access) const { return what_ + "access " + text(access.number); }

  void check_access(const AccessRecord& access) {
    if (!access.bytes && access.stay >= 0) refuse(what(access) + " has no bytes, but a stay");
    if (access.range == kDirect || !access.bytes) return;
    if (access.range < 0) refuse(what(access) + " has " + text(access.bytes) + " bytes, but no range");
    if (access.range_offset_bytes % memory_.alignment())
      refuse(what(access) + " begins at byte " + text(access.range_offset_bytes) + " of its range; kernels need a "
             "multiple of " + text(memory_.alignment()));
    if (access.stay >= 0) check_pieces(access);
    int64_t streamed = access.stay >= 0 ? method_.stays[(size_t)access.stay].bytes : 0;
    int64_t bytes = access.is_split() ? access.prefix_bytes : access.bytes;
    PieceRecord read{access.weight, 0, bytes, access.range, access.range_offset_bytes};
    for (const Span& span : memory_.spans(read)) {
      if (memory_.streams(span.block)) streamed -= span.bytes;
      else if (!memory_.holds(span))
        refuse(what(access) + " reads block " + text(span.block) + " at byte " + text(span.offset) +
               ", which is not filled with its weight");
    }
    if (streamed)
      refuse(what(access) + " reads " + text(-streamed) + " bytes of the ring beyond those that its stay copies");
  }

  // Each piece of the stay is where this access reads it.
  void check_pieces(const AccessRecord& access) {
    Stay& stay = stays_[(size_t)access.stay];
    stay.is_listed = true;
    std::vector<std::pair<int64_t, int64_t>> parts;
    for (size_t c : stay.copies) {
      const PieceRecord& piece = method_.copies[c].piece;
      std::string which = what_ + "copy " + text((int64_t)c);
      int64_t ahead = piece.weight_offset_bytes;
      if (piece.weight != access.weight || piece.range != access.range ||
          piece.range_offset_bytes - access.range_offset_bytes != ahead)
        refuse(which + " does not go where access " + text(access.number) + " reads it");
      memory_.check_ring(piece, access.bytes, which);
      parts.emplace_back(ahead, ahead + piece.bytes);
    }
    std::sort(parts.begin(), parts.end());
    for (size_t i = 1; i < parts.size(); ++i)
      if (parts[i - 1].second > parts[i].first) refuse(what(access) + " reads bytes that two copies write");
  }

  void issue(size_t copy) {
    int64_t number = method_.copies[copy].stay;
    Stay& stay = stays_[(size_t)number];
    if (stay.is_read) stay.issued = 0;
    stay.is_read = false;
    if (++stay.issued > stay.copies.size())
      refuse(what_ + "copy " + text((int64_t)copy) + " is issued before the last of stay " + text(number) +
             " was read");
    for (const Span& span : spans_[copy]) holder_[(size_t)span.block] = number;
  }

  // S3, and the part of S2 that the host's order shows.
  void read(const AccessRecord& access) {
    Stay& stay = stays_[(size_t)access.stay];
    if (stay.issued != stay.copies.size())
      refuse(what(access) + " is fetched after " + text((int64_t)stay.issued) + " of the " +
             text((int64_t)stay.copies.size()) + " copies of its stay; the others are issued behind it");
    for (size_t c : stay.copies)
      for (const Span& span : spans_[c])
        if (holder_[(size_t)span.block] != access.stay)
          refuse(what(access) + " should find stay " + text(access.stay) + " in block " + text(span.block) +
                 ", where stay " + text(holder_[(size_t)span.block]) + " was copied to after it");
    stay.is_read = true;
  }

  const MethodRecord& method_;
  const Memory& memory_;
  const std::string what_;
  std::vector<Stay> stays_;
  std::vector<std::vector<Span>> spans_;  // by copy
  std::vector<int64_t> holder_;           // by block: the stay whose copy was issued last; -1: none
};

// Rooms are memory that belongs to no single weight: slots and stores of packed weights, slots and tables of experts.
// No other range maps their blocks, and nothing else writes or reads there.
class Rooms {
 public:
  explicit Rooms(const PlanRecord& plan) : plan_(plan), has_rooms_(plan.ranges.size()) {
    if (plan.slots) add(plan.slot_range, 0, plan.slots * plan.slot_bytes);
    for (const StoreRecord& store : plan.stores) add(store.piece.range, store.piece.range_offset_bytes, store.room_bytes);
    for (const BankRecord& bank : plan.banks) {
      add(bank.range, bank.range_offset_bytes, table_layout((int)bank.experts, (int)bank.slots).bytes, kAlignment);
      for (const BankMemberRecord& member : bank.members)
        add(member.range, member.range_offset_bytes, bank.slots * member.row_bytes, kAlignment);
    }
  }

  void check() {
    std::sort(rooms_.begin(), rooms_.end());
    for (size_t i = 1; i < rooms_.size(); ++i)
      if (rooms_[i - 1].first == rooms_[i].first && rooms_[i - 1].second.second > rooms_[i].second.first)
        refuse("two rooms overlap in range " + text(rooms_[i].first));
    std::vector<int64_t> ranges_of(plan_.block_bytes.size());
    for (const RangeRecord& range : plan_.ranges)
      for (int64_t block : range.blocks) ranges_of[(size_t)block]++;
    for (size_t r = 0; r < has_rooms_.size(); ++r)
      if (has_rooms_[r])
        for (int64_t block : plan_.ranges[r].blocks)
          if (ranges_of[(size_t)block] > 1)
            refuse("block " + text(block) + " is for packed weights or experts, and another range maps it");
    for (const PieceRecord& piece : plan_.fills) refuse_use(piece.range, "a fill");
    for (const MethodRecord& method : plan_.methods) {
      for (const CopyRecord& copy : method.copies) refuse_use(copy.piece.range, "a copy");
      for (const AccessRecord& access : method.accesses)
        if (access.bytes) refuse_use(access.range, "an access");
    }
  }

 private:
  void add(int64_t range, int64_t begin, int64_t bytes, int64_t alignment = 1) {
    if (begin % alignment)
      refuse("a room begins at byte " + text(begin) + " of range " + text(range) + ", needs a multiple of " +
             text(alignment));
    has_rooms_[(size_t)range] = true;
    rooms_.push_back({range, {begin, begin + bytes}});
  }

  void refuse_use(int64_t range, const char* what) const {
    if (range >= 0 && has_rooms_[(size_t)range])
      refuse(std::string(what) + " goes to range " + text(range) + ", which is for packed weights or experts");
  }

  const PlanRecord& plan_;
  std::vector<bool> has_rooms_;
  std::vector<std::pair<int64_t, std::pair<int64_t, int64_t>>> rooms_;  // range, begin, end
};

// After an access chooses, every member of its bank must read before the next access chooses. So an expert that the
// table has in a slot is in that slot for all members.
void check_choices(const PlanRecord& plan, const MethodRecord& method, const std::string& what) {
  std::vector<std::vector<bool>> due(plan.banks.size());  // by bank and member: still to be read
  std::vector<size_t> missing(plan.banks.size());
  for (const AccessRecord& access : method.accesses) {
    if (access.bank < 0) continue;
    const auto bank = (size_t)access.bank;
    if (access.chooses) {
      if (missing[bank]) refuse(what + "access " + text(access.number) + " chooses before all have read");
      missing[bank] = plan.banks[bank].members.size();
      due[bank].assign(missing[bank], true);
    }
    if (!missing[bank] || !due[bank][access.member])
      refuse(what + "access " + text(access.number) + " reads slots that nobody has chosen for it");
    due[bank][access.member] = false;
    missing[bank]--;
  }
  for (size_t bank = 0; bank < missing.size(); ++bank)
    if (missing[bank]) refuse(what + "of bank " + text((int64_t)bank) + " not all members are read");
}

}  // namespace

void check_plan(const PlanRecord& plan, int64_t page_bytes) {
  Memory memory(plan, page_bytes);
  Rooms(plan).check();
  for (size_t m = 0; m < plan.methods.size(); ++m) {
    Method(plan.methods[m], memory, plan.block_bytes.size(), (int64_t)m).check();
    check_choices(plan, plan.methods[m], "method " + text((int64_t)m) + ", ");
  }
}

}  // namespace penstock
