// The two ways by which bytes reach the device: copies from the mapping, and copies from staging buffers.
#include "host/source.h"

#include <algorithm>

namespace penstock {
namespace {

// Visits a piece in parts that each fit a staging buffer.
template <typename Visit>
void for_each_extent(const PieceRecord& piece, const WeightPlaces& places, int64_t buffer_bytes, Visit visit) {
  const int64_t begin = places.offset_of(piece.weight, piece.weight_offset_bytes, piece.bytes);
  for (int64_t done = 0; done < piece.bytes; done += buffer_bytes)
    visit(Extent{begin + done, std::min(buffer_bytes, piece.bytes - done)}, done);
}

}  // namespace

void Source::take_memory(const PackedMemory& memory) {
  if (!memory.slots.empty() || !memory.stores.empty())
    throw CoreError(Failure::usage, "the plan has memory for packed weights, and the weights file has none");
}

RegisteredSource::RegisteredSource(Driver& driver, const HostFile& file, const WeightPlaces& places,
                                   const std::vector<size_t>& chunk_ends)
    : driver_(driver), file_(file), places_(places), registration_(driver, file, chunk_ends) {}

CopiedBytes RegisteredSource::copy(const PieceRecord& piece, Address to, Stream stream, Trace*) {
  const int64_t begin = places_.offset_of(piece.weight, piece.weight_offset_bytes, piece.bytes);
  driver_.copy_to_device(to, file_.data() + begin, (size_t)piece.bytes, stream);
  return {piece.bytes, 0};
}

Address RegisteredSource::direct(int64_t weight, int64_t offset_bytes, int64_t bytes) {
  return driver_.host_address(file_.data() + places_.offset_of(weight, offset_bytes, bytes), (size_t)bytes);
}

StagedSource::StagedSource(Driver& driver, const HostFile& file, const WeightPlaces& places, size_t buffer_bytes,
                           int buffers, int threads)
    : places_(places), buffer_bytes_((int64_t)buffer_bytes), staging_(driver, file, buffer_bytes, buffers, threads) {}

void StagedSource::load(const PieceRecord& piece, Address to, Stream stream) {
  staging_.copy_now(places_.offset_of(piece.weight, piece.weight_offset_bytes, piece.bytes), piece.bytes, to, stream);
}

void StagedSource::follow(const std::vector<PieceRecord>& once, const std::vector<PieceRecord>& cycle) {
  staging_.follow(extents(once), extents(cycle));
}

CopiedBytes StagedSource::copy(const PieceRecord& piece, Address to, Stream stream, Trace*) {
  for_each_extent(piece, places_, buffer_bytes_, [&](const Extent& extent, int64_t done) {
    staging_.copy_next(extent, to + (Address)done, stream);
  });
  return {piece.bytes, 0};
}

Address StagedSource::direct(int64_t, int64_t, int64_t) {
  throw CoreError(Failure::usage, "the plan reads a weight where it lies, which needs registered host memory: staged "
                                  "memory holds no weight for good");
}

std::vector<Extent> StagedSource::extents(const std::vector<PieceRecord>& pieces) const {
  std::vector<Extent> all;
  for (const PieceRecord& piece : pieces)
    for_each_extent(piece, places_, buffer_bytes_, [&](const Extent& extent, int64_t) { all.push_back(extent); });
  return all;
}

}  // namespace penstock
