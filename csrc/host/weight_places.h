// Where the weights of a session lie in their file, by number. A packed weight lies there packed.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "driver/driver.h"

namespace penstock {

// Bytes of a file that a copy may read at once.
struct FileExtent {
  int64_t offset_bytes;
  int64_t bytes;
};

class WeightPlaces {
 public:
  WeightPlaces() = default;
  // Throws CoreError(host_read) if a weight lies outside the file.
  WeightPlaces(const std::string& path, std::vector<FileExtent> places, int64_t file_bytes)
      : places_(std::move(places)) {
    for (const FileExtent& place : places_)
      // Compared by difference: a sum of numbers from a file may overflow.
      if (place.offset_bytes < 0 || place.bytes < 0 || place.offset_bytes > file_bytes ||
          place.bytes > file_bytes - place.offset_bytes)
        throw CoreError(Failure::host_read, "weights file " + path + " is truncated: it has " +
                                              std::to_string(file_bytes) + " bytes, and " +
                                              std::to_string(place.bytes) + " bytes from byte " +
                                              std::to_string(place.offset_bytes) + " on are needed");
  }

  const std::vector<FileExtent>& all() const { return places_; }
  size_t count() const { return places_.size(); }
  const FileExtent& operator[](size_t weight) const { return places_[weight]; }

  // The offset in the file of these bytes of a weight. Throws CoreError(usage) if the weight does not have them.
  int64_t offset_of(int64_t weight, int64_t offset_bytes, int64_t bytes) const {
    if (weight < 0 || weight >= (int64_t)places_.size() || offset_bytes < 0 || bytes < 0 ||
        offset_bytes > places_[(size_t)weight].bytes || bytes > places_[(size_t)weight].bytes - offset_bytes)
      throw CoreError(Failure::usage, std::to_string(bytes) + " bytes from byte " + std::to_string(offset_bytes) +
                                          " on are not bytes of weight " + std::to_string(weight));
    return places_[(size_t)weight].offset_bytes + offset_bytes;
  }

 private:
  std::vector<FileExtent> places_;
};

}  // namespace penstock
