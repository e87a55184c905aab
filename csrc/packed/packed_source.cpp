// Slots and stores: where packed bytes go, and which waits order them until they are decoded.
#include "packed/packed_source.h"

#include <algorithm>

#include "driver/cleanup.h"
#include "host/fault_guard.h"
#include "packed/decode_params.h"
#include "packed/parallel.h"
#include "timing/trace.h"

namespace penstock {
namespace {

// If a plan has no slots, everything is resident and is decoded once, on the host, in parts of this size.
constexpr int64_t kHostPartBytes = 16 << 20;
constexpr int64_t kHostThreads = 8;

std::string text(int64_t value) { return std::to_string(value); }

[[noreturn]] void refuse(const std::string& what) { throw CoreError(Failure::usage, "packed weights: " + what); }

}  // namespace

PackedSource::PackedSource(Driver& driver, const HostFile& file, const WeightPlaces& places,
                           std::unique_ptr<Source> beneath, std::vector<PackedWeight> weights, bool poison)
    : driver_(driver),
      file_(file),
      places_(places),
      beneath_(std::move(beneath)),
      weights_(std::move(weights)),
      poison_(poison) {
  driver_.prepare_decoding();
  link_ = driver_.create_stream();
  Undo undo([&] { driver_.destroy_stream(link_); });
  join_ = driver_.create_event(false);
  undo.keep();
}

PackedSource::~PackedSource() {
  finish();
  give_up_slots();
  quietly([&] { driver_.destroy_event(join_); });
  quietly([&] { driver_.destroy_stream(link_); });
}

const PackedWeight* PackedSource::find(int64_t weight) const {
  auto found = std::lower_bound(weights_.begin(), weights_.end(), weight,
                                [](const PackedWeight& each, int64_t wanted) { return each.weight < wanted; });
  return found != weights_.end() && found->weight == weight ? &*found : nullptr;
}

std::vector<PackedSource::Part> PackedSource::parts(const PackedWeight& weight, const PieceRecord& piece,
                                                    int64_t most_packed_bytes) const {
  if (!most_packed_bytes) refuse("a weight is copied, and the plan has no slots for it to pass through");
  const int64_t begin = piece.weight_offset_bytes, end = begin + piece.bytes;
  const size_t first = (size_t)(begin / kBlockRawBytes), last = (size_t)((end - 1) / kBlockRawBytes) + 1;
  // As few parts as possible, of about equal size: a small copy behind a large one would keep the link less busy.
  const int64_t total = weight.begins_bytes[last] - weight.begins_bytes[first];
  const int64_t even = total / ((total - 1) / most_packed_bytes + 1);
  std::vector<Part> found;
  for (size_t block = first; block < last;) {
    size_t after = block + 1;
    while (after < last && after - block < kMostBlocksALaunch &&
           weight.begins_bytes[after] - weight.begins_bytes[block] < even &&
           weight.begins_bytes[after + 1] - weight.begins_bytes[block] <= most_packed_bytes)
      after++;
    Part part{&weight, block, after, std::max(begin, (int64_t)block * kBlockRawBytes),
              std::min(end, (int64_t)after * kBlockRawBytes)};
    if (part.packed_bytes() > most_packed_bytes)
      refuse("a block has " + text(part.packed_bytes()) + " bytes, a slot of the plan " + text(most_packed_bytes));
    found.push_back(part);
    block = after;
  }
  return found;
}

PieceRecord PackedSource::in_file(const Part& part) const {
  return {part.weight->weight, part.weight->data_offset_bytes + part.weight->begins_bytes[part.first_block],
          part.packed_bytes(), 0, 0};
}

std::vector<PieceRecord> PackedSource::in_file(const std::vector<PieceRecord>& pieces) const {
  std::vector<PieceRecord> found;
  for (const PieceRecord& piece : pieces) {
    const PackedWeight* weight = find(piece.weight);
    if (!weight) found.push_back(piece);
    else if (!stored(*weight, piece))
      for (const Part& part : parts(*weight, piece, slot_bytes_)) found.push_back(in_file(part));
  }
  return found;
}

void PackedSource::follow(const std::vector<PieceRecord>& once, const std::vector<PieceRecord>& cycle) {
  beneath_->follow(in_file(once), in_file(cycle));
}

const PackedSource::Stored* PackedSource::stored(const PackedWeight& weight, const PieceRecord& piece) const {
  const int64_t begin = piece.weight_offset_bytes, end = begin + piece.bytes;
  for (auto one = std::lower_bound(stored_.begin(), stored_.end(), &weight,
                                   [](const Stored& each, const PackedWeight* wanted) { return each.weight < wanted; });
       one != stored_.end() && one->weight == &weight; ++one) {
    if (one->begin_bytes <= begin && end <= one->end_bytes) return &*one;
    if (one->begin_bytes < end && begin < one->end_bytes)
      refuse("a copy of bytes " + text(begin) + " to " + text(end) + " is partly of those that stay, " +
             text(one->begin_bytes) + " to " + text(one->end_bytes));
  }
  return nullptr;
}

void PackedSource::decode(const Part& part, Address packed, Address to, bool wide, Stream stream) {
  const PackedWeight& weight = *part.weight;
  const int64_t first_byte = (int64_t)part.first_block * kBlockRawBytes;
  DecodeCall call{weight.kind, packed, {}, part.begin_bytes - first_byte, part.end_bytes - first_byte,
                  weight.raw_bytes - first_byte, to, wide};
  // Kernels read and write sixteen bytes at a time.
  if (packed % kPackedUnitBytes) refuse("packed bytes lie at an address that is no multiple of sixteen");
  if (((Address)to - (Address)call.begin_bytes) % kPackedUnitBytes)
    refuse("bytes from " + text(part.begin_bytes) + " on go to an address that is not theirs");
  call.begins_bytes.reserve(part.end_block - part.first_block + 1);
  for (size_t block = part.first_block; block <= part.end_block; ++block)
    call.begins_bytes.push_back(weight.begins_bytes[block] - weight.begins_bytes[part.first_block]);
  driver_.decode(call, stream);
}

void PackedSource::decode_stored(const Stored& from, const PackedWeight& weight, const PieceRecord& piece, Address to,
                                 Stream stream) {
  const int64_t begin = piece.weight_offset_bytes;
  const int64_t base = weight.begins_bytes[(size_t)(from.begin_bytes / kBlockRawBytes)];
  for (const Part& part : parts(weight, piece, INT64_MAX))
    decode(part, from.address + (Address)(weight.begins_bytes[part.first_block] - base),
           to + (Address)(part.begin_bytes - begin), true, stream);
}

CopiedBytes PackedSource::copy(const PieceRecord& piece, Address to, Stream stream, Trace* trace) {
  const PackedWeight* weight = find(piece.weight);
  if (!weight) return beneath_->copy(piece, to, stream);
  if (const Stored* from = stored(*weight, piece)) {
    decode_stored(*from, *weight, piece, to, stream);
    return {0, piece.bytes};
  }
  const int64_t begin = piece.weight_offset_bytes;
  CopiedBytes copied{0, piece.bytes};
  for (const Part& part : parts(*weight, piece, slot_bytes_)) {
    Slot& slot = slots_[next_slot_];
    next_slot_ = (next_slot_ + 1) % slots_.size();
    const Address part_to = to + (Address)(part.begin_bytes - begin);
    if (capturing_) pass_through_in_graph(slot, part, part_to, stream);
    else pass_through(slot, part, part_to, stream, trace);
    copied.over_link += part.packed_bytes();
  }
  return copied;
}

void PackedSource::pass_through(Slot& slot, const Part& part, Address to, Stream stream, Trace* trace) {
  driver_.wait(link_, slot.freed);  // S1, for the slot
  if (trace) trace->link_begins(part.packed_bytes(), link_);
  beneath_->copy(in_file(part), slot.address, link_);
  if (trace) trace->link_ends(link_);
  driver_.record(slot.filled, link_);
  driver_.wait(stream, slot.filled);  // S2
  decode(part, slot.address, to, false, stream);
  if (poison_) driver_.fill(slot.address, kPoison, (size_t)slot_bytes_, stream);
  driver_.record(slot.freed, stream);
}

void PackedSource::pass_through_in_graph(Slot& slot, const Part& part, Address to, Stream stream) {
  if (slot.is_captured) driver_.wait(link_, slot.freed_in_graph);
  else driver_.wait_external(link_, slot.freed);  // freed by copies outside of the graph, or by its last launch
  beneath_->copy(in_file(part), slot.address, link_);
  driver_.record(slot.filled_in_graph, link_);
  driver_.wait(stream, slot.filled_in_graph);
  decode(part, slot.address, to, false, stream);
  if (poison_) driver_.fill(slot.address, kPoison, (size_t)slot_bytes_, stream);
  driver_.record(slot.freed_in_graph, stream);
  slot.is_captured = true;
  if (captured_left_-- <= slots_.size()) driver_.record_external(slot.freed, stream);
}

void PackedSource::begin_capture(const std::vector<PieceRecord>& pieces, Stream stream) {
  for (Slot& slot : slots_) {
    slot.is_captured = false;
    for (Event* event : {&slot.filled_in_graph, &slot.freed_in_graph})
      if (!*event) *event = driver_.create_event(false);
  }
  captured_left_ = 0;
  for (const PieceRecord& piece : pieces) {
    const PackedWeight* weight = find(piece.weight);
    if (weight && !stored(*weight, piece)) captured_left_ += parts(*weight, piece, slot_bytes_).size();
  }
  capturing_ = true;
  if (!captured_left_) return;
  driver_.record(join_, stream);
  driver_.wait(link_, join_);
}

void PackedSource::end_capture() noexcept { capturing_ = false; }

void PackedSource::load(const PieceRecord& piece, Address to, Stream stream) {
  const PackedWeight* weight = find(piece.weight);
  if (!weight) {
    beneath_->load(piece, to, stream);
    return;
  }
  if (slots_.empty()) {
    decode_on_host(*weight, piece, to, stream);
    return;
  }
  const int64_t begin = piece.weight_offset_bytes;
  for (const Part& part : parts(*weight, piece, slot_bytes_)) {
    Slot& slot = slots_[next_slot_];
    next_slot_ = (next_slot_ + 1) % slots_.size();
    driver_.wait(link_, slot.freed);
    beneath_->load(in_file(part), slot.address, link_);
    driver_.record(slot.filled, link_);
    driver_.wait(stream, slot.filled);
    decode(part, slot.address, to + (Address)(part.begin_bytes - begin), true, stream);
    if (poison_) driver_.fill(slot.address, kPoison, (size_t)slot_bytes_, stream);
    driver_.record(slot.freed, stream);
  }
}

void PackedSource::decode_on_host(const PackedWeight& weight, const PieceRecord& piece, Address to, Stream stream) {
  const int64_t begin = piece.weight_offset_bytes, end = begin + piece.bytes;
  // Not pinned: pinned memory has a cap, which is for what weights pass through in every run.
  std::vector<unsigned char> decoded((size_t)std::min(kHostPartBytes, piece.bytes));
  unsigned char* const room = decoded.data();
  const unsigned char* const blocks = file_.data() + places_[(size_t)weight.weight].offset_bytes + weight.data_offset_bytes;
  // A failed wait has not waited: the device may still read from there.
  Undo undo([&] { sync_with_retry([&] { driver_.synchronize_stream(stream); }); });
  for (int64_t low = begin; low < end; low += kHostPartBytes) {
    const int64_t high = std::min(end, low + kHostPartBytes);
    const int64_t first = low / kBlockRawBytes, count = (high - 1) / kBlockRawBytes + 1 - first;
    std::atomic<bool> is_read{true};
    in_parallel(count, std::min<int64_t>(kHostThreads, std::thread::hardware_concurrency()), [&](int64_t i) {
      const int64_t block = first + i, at = block * kBlockRawBytes;
      const int64_t raw = std::min(kBlockRawBytes, weight.raw_bytes - at);
      const int64_t packed_begin = weight.begins_bytes[(size_t)block];
      const int64_t packed_bytes = weight.begins_bytes[(size_t)block + 1] - packed_begin;
      unsigned char packed[2 * kBlockRawBytes];
      if (!guarded_copy(packed, blocks + packed_begin, (size_t)packed_bytes)) {
        is_read = false;
        return;
      }
      const int64_t from = std::max(low, at), until = std::min(high, at + raw);
      unpack_block(weight.kind, packed, packed_bytes, raw, from - at, until - at, room + (from - low));
    });
    if (!is_read) throw CoreError(Failure::host_read, "weights file " + file_.path() + " was truncated");
    driver_.copy_to_device(to + (Address)(low - begin), room, (size_t)(high - low), stream);
    driver_.synchronize_stream(stream);
  }
}

int64_t PackedSource::link_bytes(const PieceRecord& piece) const {
  const PackedWeight* weight = find(piece.weight);
  if (!weight) return piece.bytes;
  if (stored(*weight, piece)) return 0;
  int64_t bytes = 0;
  for (const Part& part : parts(*weight, piece, slot_bytes_)) bytes += part.packed_bytes();
  return bytes;
}

Address PackedSource::direct(int64_t weight, int64_t offset_bytes, int64_t bytes) {
  if (find(weight)) refuse("the plan reads one where it lies, which only unpacked ones can be");
  return beneath_->direct(weight, offset_bytes, bytes);
}

void PackedSource::take_memory(const PackedMemory& memory) {
  finish();
  give_up_slots();
  stored_.clear();
  Undo undo([&] { give_up_slots(); });
  for (Address address : memory.slots) {
    slots_.emplace_back();
    slots_.back().address = address;
    slots_.back().filled = driver_.create_event(false);
    slots_.back().freed = driver_.create_event(false);
  }
  slot_bytes_ = memory.slot_bytes;
  next_slot_ = 0;
  for (const PackedMemory::Store& store : memory.stores) {
    const PackedWeight* weight = find(store.piece.weight);
    if (!weight) refuse("a weight that is not packed was to stay so");
    const int64_t begin = store.piece.weight_offset_bytes;
    const std::vector<Part> all = parts(*weight, store.piece, INT64_MAX);
    const int64_t first = weight->begins_bytes[all.front().first_block];
    if (weight->begins_bytes[all.back().end_block] - first > store.room_bytes)
      refuse("bytes " + text(begin) + " to " + text(begin + store.piece.bytes) + " of a weight do not fit where they are "
             "to stay");
    beneath_->load({weight->weight, weight->data_offset_bytes + first,
                    weight->begins_bytes[all.back().end_block] - first, 0, 0},
                   store.address, link_);
    stored_.push_back({weight, begin, begin + store.piece.bytes, store.address});
  }
  std::sort(stored_.begin(), stored_.end(), [](const Stored& one, const Stored& other) {
    return std::pair(one.weight, one.begin_bytes) < std::pair(other.weight, other.begin_bytes);
  });
  driver_.synchronize_stream(link_);
  undo.keep();
}

void PackedSource::poison(Stream stream) {
  for (const Slot& slot : slots_) driver_.fill(slot.address, kPoison, (size_t)slot_bytes_, stream);
}

void PackedSource::finish() noexcept {
  sync_with_retry([&] { driver_.synchronize_stream(link_); });
}

void PackedSource::give_up_slots() noexcept {
  for (Slot& slot : slots_)
    for (Event event : {slot.filled, slot.freed, slot.filled_in_graph, slot.freed_in_graph})
      if (event) quietly([&] { driver_.destroy_event(event); });
  slots_.clear();
  slot_bytes_ = 0;
}

}  // namespace penstock
