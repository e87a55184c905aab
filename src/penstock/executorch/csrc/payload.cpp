#include "payload.h"

#include <algorithm>
#include <cstring>

#include "json.h"
#include "load_error.h"

namespace penstock_executorch {
namespace {

constexpr uint64_t kVersion = 6;
constexpr int kWeightShift = 40;

struct Header {
  char magic[8];
  uint64_t version;
  uint64_t hash;
  uint64_t text_bytes;
  uint64_t plans_bytes;
  uint64_t code_bytes;
};
constexpr size_t kSealedFrom = 24;

[[noreturn]] void refuse(const std::string& text) { throw LoadError(Kind::package, text); }

// FNV-1a with 64 bits, over little-endian words of 8 bytes and then over the bytes that are left.
uint64_t hash(const char* at, size_t bytes) {
  constexpr uint64_t kPrime = 0x100000001B3ull;
  uint64_t value = 0xCBF29CE484222325ull;
  for (; bytes >= sizeof(uint64_t); bytes -= sizeof(uint64_t), at += sizeof(uint64_t)) {
    uint64_t word;
    std::memcpy(&word, at, sizeof word);
    value = (value ^ word) * kPrime;
  }
  for (; bytes; --bytes, ++at) value = (value ^ (unsigned char)*at) * kPrime;
  return value;
}

// The header, checked; the parts follow it one after the other.
Header opened(const void* data, size_t bytes, const char* magic, const char* what) {
  Header header;
  if (!data || bytes < sizeof header)
    refuse(std::string(what) + " has " + std::to_string(bytes) + " bytes, its header needs " +
           std::to_string(sizeof header));
  std::memcpy(&header, data, sizeof header);
  if (std::memcmp(header.magic, magic, sizeof header.magic) != 0)
    refuse(std::string(what) + " does not begin as one does: it was not written by Penstock");
  if (header.version != kVersion)
    refuse(std::string(what) + " has format version " + std::to_string(header.version) +
           "; this library reads version " + std::to_string(kVersion));
  size_t left = bytes - sizeof header;
  for (uint64_t part : {header.text_bytes, header.plans_bytes, header.code_bytes}) {
    if (part > left) refuse(std::string(what) + " is truncated: it has " + std::to_string(bytes) + " bytes");
    left -= part;
  }
  if (left) refuse(std::string(what) + " has " + std::to_string(left) + " bytes too many");
  const char* start = static_cast<const char*>(data);
  if (hash(start + kSealedFrom, bytes - kSealedFrom) != header.hash)
    refuse(std::string(what) + " is damaged: its bytes do not have the hash that its header names");
  return header;
}

// What counts bytes or things: never negative.
int64_t counted(const Json& row, const char* key) {
  int64_t value = row.at(key).integer();
  if (value < 0) refuse(std::string("the program says ") + key + " is " + std::to_string(value));
  return value;
}

std::optional<int64_t> optional_counted(const Json& row, const char* key) {
  if (row.at(key).is_null()) return std::nullopt;
  return counted(row, key);
}

std::string hex(uint64_t value) {
  std::string text(16, '0');
  for (size_t i = text.size(); i > 0; value >>= 4) text[--i] = "0123456789abcdef"[value & 15];
  return text;
}

// Compiled code takes its layout for granted.
StateFacts read_state(const Json& row) {
  StateFacts state{row.at("name").string(),        row.at("scalar_type").integer(), row.at("shape").integers(),
                   row.at("dim_order").integers(), counted(row, "nbytes"),          row.at("stored").integer() != 0};
  std::vector<int64_t> dims = state.dim_order;
  std::sort(dims.begin(), dims.end());
  for (size_t i = 0; i < dims.size(); ++i)
    if (dims[i] != (int64_t)i) refuse("state '" + state.name + "' has dim order " + listed(state.dim_order));
  if (dims.size() != state.shape.size()) refuse("state '" + state.name + "' has a shape of other dimensions than its order");
  for (int64_t size : state.shape)
    if (size < 0) refuse("state '" + state.name + "' has shape " + listed(state.shape));
  return state;
}

// `seal`: what the description says of the plan that was proved and written here; `name` is the plan's.
StoredPlan read_plan(const char*& at, const char* end, const std::string& seal, const std::string& name) {
  const char* start = at;
  uint64_t head[2];
  if ((size_t)(end - at) < sizeof head) refuse("the plans of the program are truncated");
  std::memcpy(head, at, sizeof head);
  at += sizeof head;
  if (head[1] > (size_t)(end - at) / sizeof(int64_t)) refuse("the plans of the program are truncated");
  if (head[0] > (uint64_t)INT64_MAX) refuse("a plan of the program needs more memory than there can be");
  StoredPlan plan{(int64_t)head[0], at, (size_t)head[1]};
  at += head[1] * sizeof(int64_t);
  if (hex(hash(start, (size_t)(at - start))) != seal)
    refuse(name + " is not the one that was written: its numbers do not have the hash that the description names");
  return plan;
}

// The plans of all tables follow one another.
std::vector<PlanTable> read_plan_tables(const Json& rows, size_t methods, const char* at, size_t bytes) {
  std::vector<PlanTable> tables;
  const char* end = at + bytes;
  for (const Json& row : rows.list()) {
    PlanTable table{row.at("methods").integers(), row.at("reads_in_place").integer() != 0,
                  counted(row, "floor_bytes"), counted(row, "full_bytes"), {}};
    for (int64_t method : table.methods)
      if (method < 0 || (size_t)method >= methods) refuse("the program has plans for a method that it has not");
    const std::vector<Json>& seals = row.at("seals").list();
    if ((int64_t)seals.size() != row.at("plans").integer())
      refuse("the program names " + std::to_string(seals.size()) + " hashes for " +
             std::to_string(row.at("plans").integer()) + " plans");
    for (const Json& seal : seals)
      table.plans.push_back(read_plan(at, end, seal.string(),
                                       "plan " + std::to_string(table.plans.size() + 1) + " of " +
                                           std::to_string(seals.size()) + " for methods " + listed(table.methods)));
    if (table.plans.empty()) refuse("the program holds no plan");
    tables.push_back(std::move(table));
  }
  if (at != end) refuse("the program holds plans that its description does not list");
  return tables;
}

// Walks over a plan's numbers and puts file offsets in place of (weight << 40) + offset.
class Rebase {
 public:
  Rebase(std::vector<int64_t>& numbers, const std::vector<int64_t>& offsets, const std::vector<WeightFacts>& weights)
      : numbers_(numbers), offsets_(offsets), weights_(weights) {}

  void run() {
    skip(next());  // blocks
    ranges_at = at_;
    for (int64_t ranges = next(); ranges > 0; --ranges) skip(next());
    fills_at = at_;
    for (int64_t fills = next(); fills > 0; --fills) piece();
    slots_at = at_;
    int64_t slots = next(), stores = next();
    if (slots || stores) refuse("a plan of the program is for packed weights, and plans in a .pte are for weights as they are");
    for (int64_t methods = next(); methods > 0; --methods) {
      next();  // steps
      int64_t accesses = next(), stays = next();
      for (; accesses > 0; --accesses) access();
      skip(stays, 2);
      for (int64_t copies = next(); copies > 0; --copies) {
        is_copying = true;
        skip(3);
        piece();
      }
      skip(next());  // prologue
    }
    if (at_ != numbers_.size()) refuse("a plan of the program has numbers too many");
  }

  // Of the plan, after run().
  size_t ranges_at = 0, fills_at = 0, slots_at = 0;
  bool is_copying = false;
  std::set<size_t> in_place;

 private:
  int64_t next() {
    if (at_ >= numbers_.size()) refuse("a plan of the program ends early");
    return numbers_[at_++];
  }
  void skip(int64_t count, int64_t each = 1) {
    if (count < 0 || (uint64_t)count > (numbers_.size() - at_) / (uint64_t)each)
      refuse("a plan of the program ends early");
    at_ += (size_t)(count * each);
  }
  // One that is read in host memory names its place in the file instead of one in a range; all name it at their end.
  void access() {
    constexpr int64_t kDirect = -2;
    next();
    int64_t bytes = next(), range = next();
    size_t offset_at = at_, source_at = at_ + 3;
    skip(4);
    if (range == kDirect) in_place.insert((size_t)((uint64_t)numbers_[offset_at] >> kWeightShift));
    if (range == kDirect) rebase(numbers_[offset_at], bytes);
    rebase(numbers_[source_at], bytes);
  }
  void piece() {
    size_t source_at = at_;
    next();
    int64_t bytes = next();
    skip(2);
    rebase(numbers_[source_at], bytes);
  }
  void rebase(int64_t& source, int64_t bytes) {
    uint64_t weight = (uint64_t)source >> kWeightShift;
    int64_t within = source & ((int64_t{1} << kWeightShift) - 1);
    if (weight >= offsets_.size()) refuse("a plan of the program names a weight that is none");
    if (bytes < 0 || within > weights_[weight].bytes || bytes > weights_[weight].bytes - within)
      refuse("a plan of the program copies more of '" + weights_[weight].name + "' than it has");
    source = offsets_[weight] + within;
  }

  std::vector<int64_t>& numbers_;
  const std::vector<int64_t>& offsets_;
  const std::vector<WeightFacts>& weights_;
  size_t at_ = 0;
};

// A copy of the numbers, walked over.
Rebase walked(const StoredPlan& plan, const std::vector<WeightFacts>& weights, std::vector<int64_t>& numbers) {
  numbers.resize(plan.count);
  std::memcpy(numbers.data(), plan.numbers, plan.count * sizeof(int64_t));
  const std::vector<int64_t> anywhere(weights.size(), 0);
  Rebase rebase(numbers, anywhere, weights);
  rebase.run();
  return rebase;
}

constexpr int64_t kMostSlotsBytes = 24 << 20;
constexpr int64_t kSlotsPartOfPlan = 32;
constexpr int64_t kSlotAlignmentBytes = 256;

// At least two that hold a block each: one is filled while the other is decoded.
Slots slots_of(int64_t wanted_bytes, int64_t page_bytes, int64_t block_bytes) {
  auto whole = [](int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; };
  const int64_t least_bytes = whole(2 * whole(block_bytes, kSlotAlignmentBytes), page_bytes);
  const int64_t total_bytes = std::max(std::min(kMostSlotsBytes, wanted_bytes) / page_bytes * page_bytes, least_bytes);
  const int64_t count = total_bytes / 3 / kSlotAlignmentBytes * kSlotAlignmentBytes >= block_bytes ? 3 : 2;
  return {count, total_bytes / count / kSlotAlignmentBytes * kSlotAlignmentBytes, total_bytes};
}

// The same plans for packed weights: whatever is copied passes through slots. Nothing where one is read in place.
std::optional<PlanTable> with_slots(PlanTable table, const Payload& payload, const PackedWeights& packed) {
  const Slots least = slots_of(0, payload.page_bytes, packed.largest_block_bytes);
  for (size_t i = 0; i < table.plans.size(); ++i) {
    StoredPlan& plan = table.plans[i];
    std::vector<int64_t> numbers;
    const Rebase walk = walked(plan, payload.weights, numbers);
    for (size_t weight : walk.in_place)
      if (packed.weights.count(weight)) return std::nullopt;
    // With everything resident it is decoded once, on the host.
    if (!walk.is_copying) continue;
    // The first is for the floor.
    plan.slots = i == 0 ? least : slots_of(plan.device_bytes / kSlotsPartOfPlan, payload.page_bytes,
                                           packed.largest_block_bytes);
    if (plan.device_bytes > INT64_MAX - plan.slots.total_bytes) refuse("a plan needs more memory than there can be");
    plan.device_bytes += plan.slots.total_bytes;
  }
  if (table.plans.front().slots.count && table.floor_bytes < table.full_bytes)
    table.floor_bytes = std::min(table.full_bytes, table.floor_bytes + least.total_bytes);
  return table;
}

// One block more, which is a range of its own.
void add_slots(std::vector<int64_t>& numbers, const Slots& slots, const Rebase& plan) {
  const int64_t blocks = numbers[0], ranges = numbers[plan.ranges_at];
  std::vector<int64_t> made{blocks + 1};
  auto take = [&](size_t begin, size_t end) {
    made.insert(made.end(), numbers.begin() + (ptrdiff_t)begin, numbers.begin() + (ptrdiff_t)end);
  };
  take(1, plan.ranges_at);
  made.insert(made.end(), {slots.total_bytes, ranges + 1});
  take(plan.ranges_at + 1, plan.fills_at);
  made.insert(made.end(), {1, blocks});
  take(plan.fills_at, plan.slots_at);
  made.insert(made.end(), {slots.count, ranges, slots.bytes});
  take(plan.slots_at + 1, numbers.size());
  numbers = std::move(made);
}

}  // namespace

DelegateRef read_delegate_ref(const void* data, size_t bytes) {
  Header header = opened(data, bytes, "PNSTKDLG", "the delegate's blob");
  Json text = Json::parse(std::string(static_cast<const char*>(data) + sizeof header, header.text_bytes));
  return {text.at("payload").string(), text.at("method").string(), text.at("number").integer()};
}

Payload read_payload(const void* data, size_t bytes) {
  Header header = opened(data, bytes, "PNSTKPRG", "the program");
  const char* start = static_cast<const char*>(data) + sizeof header;
  Json text = Json::parse(std::string(start, header.text_bytes));
  Payload out;
  out.program = text.at("program").string();
  out.device = text.at("device").string();
  out.page_bytes = counted(text, "page_bytes");
  if (!out.page_bytes) refuse("the program says page_bytes is 0");
  out.baked_bytes = optional_counted(text, "budget_bytes");
  out.activation_bytes = optional_counted(text, "activation_bytes");
  out.torch = text.at("built_with").at("torch").string();
  out.machine = text.at("built_with").at("machine").string();
  out.cpu = text.at("built_with").at("cpu").string();
  if (out.device == "cuda") {
    out.capability = text.at("built_with").at("capability").string();
    out.gpu = text.at("built_with").at("gpu").string();
  }
  for (const Json& row : text.at("weights").list()) {
    std::vector<std::string> names;
    for (const Json& name : row.at("names").list()) names.push_back(name.string());
    if (names.empty()) refuse("a weight of the program has no name");
    out.weights.push_back({names.front(), names, row.at("scalar_type").integer(), row.at("shape").integers(),
                           row.at("dim_order").integers(), counted(row, "nbytes")});
  }
  for (const Json& row : text.at("states").list())
    out.states.push_back(read_state(row));
  for (const Json& row : text.at("methods").list()) {
    MethodFacts method{row.at("name").string(), row.at("states").integers(), {}, counted(row, "outputs")};
    for (int64_t state : method.states)
      if (state < 0 || (size_t)state >= out.states.size()) refuse("a method of the program has state that is none");
    for (const Json& input : row.at("inputs").list())
      method.inputs.push_back(
          {input.at("scalar_type").integer(), input.at("shape").integers(), input.at("dim_order").integers()});
    out.methods.push_back(std::move(method));
  }
  out.plan_tables =
      read_plan_tables(text.at("plan_tables"), out.methods.size(), start + header.text_bytes, header.plans_bytes);
  out.description = start;
  out.description_bytes = header.text_bytes;
  out.code = start + header.text_bytes + header.plans_bytes;
  out.code_bytes = header.code_bytes;
  return out;
}

PlanTable find_plan_table(const Payload& payload, const std::vector<int64_t>& methods, bool staged,
                   const PackedWeights& packed) {
  for (const PlanTable& table : payload.plan_tables) {
    if (table.methods != methods || (staged && table.reads_in_place)) continue;
    if (packed.weights.empty()) return table;
    if (std::optional<PlanTable> found = with_slots(table, payload, packed)) return *found;
  }
  refuse("the program holds no plans for methods " + listed(methods) +
         (staged || !packed.weights.empty() ? " without reading in place" : ""));
}

std::vector<int64_t> rebased(const StoredPlan& plan, const std::vector<int64_t>& weight_offsets,
                             const std::vector<WeightFacts>& weights) {
  std::vector<int64_t> numbers(plan.count);
  std::memcpy(numbers.data(), plan.numbers, plan.count * sizeof(int64_t));
  Rebase rebase(numbers, weight_offsets, weights);
  rebase.run();
  if (plan.slots.count) add_slots(numbers, plan.slots, rebase);
  return numbers;
}

}  // namespace penstock_executorch
