// Where the bytes of weights come from: the mapped and registered file, or staging buffers that readers fill ahead.
#pragma once

#include <memory>
#include <vector>

#include "driver.h"
#include "host_file.h"
#include "plan_records.h"
#include "registration.h"
#include "staging.h"

namespace penstock {

class Source {
 public:
  virtual ~Source() = default;

  // At load, outside of any run.
  virtual void load(const PieceRecord& piece, Address to, Stream stream) = 0;

  // The order of the copies to come: `once`, then `cycle` over and over.
  virtual void follow(const std::vector<PieceRecord>& once, const std::vector<PieceRecord>& cycle) = 0;
  virtual void copy(const PieceRecord& piece, Address to, Stream stream) = 0;

  // Where kernels read these bytes without a copy, as long as the source lives. Throws where there is no such place.
  virtual Address direct(int64_t offset_bytes, int64_t bytes) = 0;

  // Whether a copy can be made again and again without the host: from an address that stays, whatever came before.
  virtual bool is_fixed() const = 0;
};

// Copies straight out of the mapping; any order will do.
class RegisteredSource final : public Source {
 public:
  RegisteredSource(Driver& driver, const HostFile& file, const std::vector<size_t>& chunk_ends);

  void load(const PieceRecord& piece, Address to, Stream stream) override { copy(piece, to, stream); }
  void follow(const std::vector<PieceRecord>&, const std::vector<PieceRecord>&) override {}
  void copy(const PieceRecord& piece, Address to, Stream stream) override;
  Address direct(int64_t offset_bytes, int64_t bytes) override;
  bool is_fixed() const override { return true; }

 private:
  Driver& driver_;
  const HostFile& file_;
  Registration registration_;
};

class StagedSource final : public Source {
 public:
  StagedSource(Driver& driver, const HostFile& file, size_t buffer_bytes, int buffers, int threads);

  void load(const PieceRecord& piece, Address to, Stream stream) override;
  void follow(const std::vector<PieceRecord>& once, const std::vector<PieceRecord>& cycle) override;
  void copy(const PieceRecord& piece, Address to, Stream stream) override;
  Address direct(int64_t offset_bytes, int64_t bytes) override;
  bool is_fixed() const override { return false; }

 private:
  std::vector<Extent> extents(const std::vector<PieceRecord>& pieces) const;

  int64_t buffer_bytes_;
  Staging staging_;
};

}  // namespace penstock
