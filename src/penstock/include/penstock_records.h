// The reader of flat records: 64-bit little-endian numbers, and text as its length in bytes, then the bytes, padded
// with zeros to whole numbers. The core and the ExecuTorch delegate read plans, descriptions and a delegate's own data
// with it; src/penstock/record.py writes them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace penstock {

// The first number of every record. The same in src/penstock/record.py.
constexpr int64_t kRecordVersion = 10;

// A record was refused; nothing was made from it.
struct RecordError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class RecordReader {
 public:
  // `what`: as in "the plan". The numbers need not be aligned.
  RecordReader(const void* numbers, size_t count, const char* what)
      : numbers_(static_cast<const char*>(numbers)), count_(count), what_(what) {
    if (next() != kRecordVersion)
      throw RecordError("the records of " + what_ + " are of version " + std::to_string(at(0)) + ", needs version " +
                        std::to_string(kRecordVersion));
  }

  int64_t next() {
    if (at_ >= count_) throw RecordError("the records of " + what_ + " end after " + std::to_string(count_) + " numbers");
    return at(at_++);
  }

  // A number that must lie in [low, high).
  int64_t next(int64_t low, int64_t high) {
    next();
    return last(1, low, high);
  }

  // The same check for a number that was read before: the `back`-th last.
  int64_t last(size_t back, int64_t low, int64_t high) const {
    const int64_t value = at(at_ - back);
    if (value < low || value >= high)
      throw RecordError("number " + std::to_string(at_ - back) + " of the records of " + what_ + " is " +
                        std::to_string(value) + ", needs to be in [" + std::to_string(low) + ", " +
                        std::to_string(high) + ")");
    return value;
  }

  // A number of bytes, added to a sum that must not overflow.
  int64_t next_of(int64_t& sum) {
    const int64_t value = next(1, INT64_MAX - sum);
    sum += value;
    return value;
  }

  // How many items follow, each of at least `numbers_each` numbers. So no more is allocated than can follow.
  size_t length(size_t numbers_each = 1) {
    next();
    return (size_t)last(1, 0, (int64_t)((count_ - at_) / numbers_each) + 1);
  }

  std::vector<int64_t> integers(int64_t low, int64_t high) {
    std::vector<int64_t> found(length());
    for (int64_t& number : found) number = next(low, high);
    return found;
  }

  std::string text() {
    const int64_t bytes = next();
    last(1, 0, (int64_t)((count_ - at_) * sizeof(int64_t)) + 1);
    const char* begin = numbers_ + at_ * sizeof(int64_t);
    const size_t whole = ((size_t)bytes + sizeof(int64_t) - 1) / sizeof(int64_t);
    for (size_t i = (size_t)bytes; i < whole * sizeof(int64_t); ++i)
      if (begin[i]) throw RecordError("text in the records of " + what_ + " is not filled up with zeros");
    at_ += whole;
    return {begin, (size_t)bytes};
  }

  void finish() const {
    if (at_ != count_)
      throw RecordError("the records of " + what_ + " have " + std::to_string(count_) + " numbers, and end after " +
                        std::to_string(at_));
  }

 private:
  int64_t at(size_t index) const {
    int64_t number;
    std::memcpy(&number, numbers_ + index * sizeof number, sizeof number);
    return number;
  }

  const char* numbers_;
  size_t count_;
  std::string what_;
  size_t at_ = 0;
};

}  // namespace penstock
