// Where the bytes of weights come from: the mapped and registered file, or staging buffers that readers fill ahead.
#pragma once

#include <memory>
#include <vector>

#include "driver/driver.h"
#include "host/host_file.h"
#include "host/registration.h"
#include "host/staging.h"
#include "host/weight_places.h"
#include "plan/plan_records.h"

namespace penstock {

class Trace;

// What one copy moved: the bytes over the link and, for packed weights, the bytes that decoding produced.
struct CopiedBytes {
  int64_t over_link;
  int64_t decoded;
};

// Device memory for packed weights: slots that their bytes pass through, and stores for those that stay packed.
struct PackedMemory {
  std::vector<Address> slots;
  int64_t slot_bytes = 0;
  struct Store {
    PieceRecord piece;  // of the weight
    Address address;
    int64_t room_bytes;
  };
  std::vector<Store> stores;
};

class Source {
 public:
  virtual ~Source() = default;

  // At load, outside any run.
  virtual void load(const PieceRecord& piece, Address to, Stream stream) = 0;

  // The order of the copies to come: `once`, then `cycle` over and over.
  virtual void follow(const std::vector<PieceRecord>& once, const std::vector<PieceRecord>& cycle) = 0;
  // `trace`, if any, is told when bytes are in flight on the source's own stream.
  virtual CopiedBytes copy(const PieceRecord& piece, Address to, Stream stream, Trace* trace = nullptr) = 0;

  // The address at which kernels read these bytes without a copy, as long as the source lives. Throws if there is none.
  virtual Address direct(int64_t weight, int64_t offset_bytes, int64_t bytes) = 0;

  // Whether a copy can be repeated without the host: from a fixed address, whatever was copied before.
  virtual bool is_fixed() const = 0;

  // How many bytes of a copy go over the link.
  virtual int64_t link_bytes(const PieceRecord& piece) const { return piece.bytes; }

  // Called when a plan is installed, before anything is loaded. Called again, with no memory, when all work has ended
  // and before the plan's memory goes.
  virtual void take_memory(const PackedMemory& memory);
  // Overwrites what a failed run may have left undecoded in that memory. Nothing is in flight.
  virtual void poison(Stream) {}
  // Waits for work on the source's own stream, if it has one.
  virtual void finish() noexcept {}
  virtual Stream link_stream() const { return nullptr; }
  // Around a capture. Takes the pieces to copy in it, in order, and their stream, which is captured if there are any.
  virtual void begin_capture(const std::vector<PieceRecord>&, Stream) {}
  virtual void end_capture() noexcept {}
};

// Copies straight out of the mapping; any order will do.
class RegisteredSource final : public Source {
 public:
  RegisteredSource(Driver& driver, const HostFile& file, const WeightPlaces& places,
                   const std::vector<size_t>& chunk_ends);

  void load(const PieceRecord& piece, Address to, Stream stream) override { copy(piece, to, stream); }
  void follow(const std::vector<PieceRecord>&, const std::vector<PieceRecord>&) override {}
  CopiedBytes copy(const PieceRecord& piece, Address to, Stream stream, Trace* trace = nullptr) override;
  Address direct(int64_t weight, int64_t offset_bytes, int64_t bytes) override;
  bool is_fixed() const override { return true; }

 private:
  Driver& driver_;
  const HostFile& file_;
  const WeightPlaces& places_;
  Registration registration_;
};

class StagedSource final : public Source {
 public:
  StagedSource(Driver& driver, const HostFile& file, const WeightPlaces& places, size_t buffer_bytes, int buffers,
               int threads);

  void load(const PieceRecord& piece, Address to, Stream stream) override;
  void follow(const std::vector<PieceRecord>& once, const std::vector<PieceRecord>& cycle) override;
  CopiedBytes copy(const PieceRecord& piece, Address to, Stream stream, Trace* trace = nullptr) override;
  Address direct(int64_t weight, int64_t offset_bytes, int64_t bytes) override;
  bool is_fixed() const override { return false; }

 private:
  std::vector<Extent> extents(const std::vector<PieceRecord>& pieces) const;

  const WeightPlaces& places_;
  int64_t buffer_bytes_;
  Staging staging_;
};

}  // namespace penstock
