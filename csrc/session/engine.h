// A session and what it needs: the file, where weights lie in it, and how their bytes reach the device.
#pragma once

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "open/host_limit.h"
#include "open/staging_sizes.h"
#include "packed/packed_source.h"
#include "session/lru_session.h"
#include "session/planned_session.h"

namespace penstock {

// Members are destroyed last to first.
struct Engine {
  Driver* driver;
  // The share of host memory, kept for as long as any of it may be held. Null if nothing was opened here.
  std::unique_ptr<HostShare> share;
  std::unique_ptr<HostFile> file;
  // By weight number: where it lies in the file, and its unpacked bytes.
  WeightPlaces places;
  std::vector<int64_t> weight_bytes;
  std::unique_ptr<Source> source;
  std::unique_ptr<PlannedSession> planned;
  std::unique_ptr<LruSession> lru;
  std::vector<SpanRecord> spans;  // of the trace that was stopped last
  std::thread::id run_thread;     // the thread between begin and end, if any
  int64_t host_bytes = 0;

  StreamingSession& session() {
    if (planned) return *planned;
    return *lru;
  }

  void map(const std::string& path, const int64_t* extents, int64_t extent_count) {
    file = std::make_unique<HostFile>(path);
    const auto* begin = reinterpret_cast<const FileExtent*>(extents);
    places = WeightPlaces(path, {begin, begin + extent_count}, (int64_t)file->bytes());
    for (size_t weight = 0; weight < places.count(); ++weight) weight_bytes.push_back(places[weight].bytes);
  }

  void stage(const StagingSizes& sizes) {
    source = std::make_unique<StagedSource>(*driver, *file, places, (size_t)sizes.buffer_bytes, sizes.buffers,
                                            sizes.threads);
  }

  void register_chunks(const std::vector<size_t>& ends) {
    source = std::make_unique<RegisteredSource>(*driver, *file, places, ends);
  }

  // Needs a source.
  void begin(const std::vector<int64_t>& packed, bool is_lru, int32_t device_index, bool poison) {
    if (!packed.empty()) {
      if (is_lru)
        throw CoreError(Failure::usage, "packed weights are decoded as a plan says, and the policy lru has none");
      std::vector<PackedWeight> weights = read_packed(packed.data(), packed.size(), places);
      for (const PackedWeight& weight : weights) weight_bytes[(size_t)weight.weight] = weight.raw_bytes;
      source = std::make_unique<PackedSource>(*driver, *file, places, std::move(source), std::move(weights), poison);
    }
    if (is_lru) lru = std::make_unique<LruSession>(*driver, *source, device_index, poison);
    else planned = std::make_unique<PlannedSession>(*driver, *source, device_index, poison);
  }
};

}  // namespace penstock
