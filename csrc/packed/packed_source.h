// Weights that are packed in the file: their bytes go to the device still packed, and are decoded there. All others
// come from the source beneath.
//
// A plan knows the bytes of weights, not those of the file. Here the (weight, offset) of unpacked bytes becomes the
// (weight, offset) of packed bytes, which the source beneath finds in the file.
#pragma once

#include <memory>
#include <vector>

#include "host/source.h"
#include "packed/decode_call.h"
#include "packed/packed_records.h"

namespace penstock {

class PackedSource final : public Source {
 public:
  PackedSource(Driver& driver, const HostFile& file, const WeightPlaces& places, std::unique_ptr<Source> beneath,
               std::vector<PackedWeight> weights, bool poison);
  ~PackedSource() override;

  void load(const PieceRecord& piece, Address to, Stream stream) override;
  void follow(const std::vector<PieceRecord>& once, const std::vector<PieceRecord>& cycle) override;
  CopiedBytes copy(const PieceRecord& piece, Address to, Stream stream, Trace* trace = nullptr) override;
  Address direct(int64_t weight, int64_t offset_bytes, int64_t bytes) override;
  int64_t link_bytes(const PieceRecord& piece) const override;
  bool is_fixed() const override { return beneath_->is_fixed(); }
  void take_memory(const PackedMemory& memory) override;
  void poison(Stream stream) override;
  void finish() noexcept override;
  Stream link_stream() const override { return link_; }
  void begin_capture(const std::vector<PieceRecord>& pieces, Stream stream) override;
  void end_capture() noexcept override;

 private:
  // What one launch decodes: blocks [first, end) of a weight, of which bytes [begin, end) are wanted.
  struct Part {
    const PackedWeight* weight;
    size_t first_block;
    size_t end_block;
    int64_t begin_bytes;  // in the weight
    int64_t end_bytes;
    int64_t packed_bytes() const { return weight->begins_bytes[end_block] - weight->begins_bytes[first_block]; }
  };
  // A buffer that packed bytes pass through: filled by a copy, read by the decoding, then filled again.
  struct Slot {
    Address address = 0;
    Event filled = nullptr;
    Event freed = nullptr;
    // The same while captured.
    Event filled_in_graph = nullptr;
    Event freed_in_graph = nullptr;
    bool is_captured = false;
  };
  struct Stored {
    const PackedWeight* weight;
    int64_t begin_bytes;  // in the weight
    int64_t end_bytes;
    Address address;  // of its first block
  };

  // Null if it is not packed.
  const PackedWeight* find(int64_t weight) const;
  const Stored* stored(const PackedWeight& weight, const PieceRecord& piece) const;
  // In the order of their bytes; none has more than `most_packed_bytes`.
  std::vector<Part> parts(const PackedWeight& weight, const PieceRecord& piece, int64_t most_packed_bytes) const;
  PieceRecord in_file(const Part& part) const;
  std::vector<PieceRecord> in_file(const std::vector<PieceRecord>& pieces) const;
  void decode(const Part& part, Address packed, Address to, bool wide, Stream stream);
  void decode_stored(const Stored& from, const PackedWeight& weight, const PieceRecord& piece, Address to,
                     Stream stream);
  void decode_on_host(const PackedWeight& weight, const PieceRecord& piece, Address to, Stream stream);
  void pass_through(Slot& slot, const Part& part, Address to, Stream stream, Trace* trace);
  void pass_through_in_graph(Slot& slot, const Part& part, Address to, Stream stream);
  void give_up_slots() noexcept;

  Driver& driver_;
  const HostFile& file_;
  const WeightPlaces& places_;
  const std::unique_ptr<Source> beneath_;
  const std::vector<PackedWeight> weights_;  // in the order of their numbers
  const bool poison_;
  Stream link_ = nullptr;
  Event join_ = nullptr;  // brings the link's stream into a capture
  std::vector<Slot> slots_;
  int64_t slot_bytes_ = 0;
  size_t next_slot_ = 0;
  std::vector<Stored> stored_;  // by weight and offset
  bool capturing_ = false;
  // How many parts of a capture still have to pass through slots. The last to use a slot records its external event.
  size_t captured_left_ = 0;
};

}  // namespace penstock
