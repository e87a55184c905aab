// For weights that are not registered: a bounded ring of pinned buffers, which readers fill from the file ahead of use.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "driver/driver.h"
#include "host/host_file.h"

namespace penstock {

// Bytes of the file, at most one buffer of them.
struct Extent {
  int64_t offset_bytes;
  int64_t bytes;
};

// One thread at a time calls follow, copy_next and copy_now.
class Staging {
 public:
  Staging(Driver& driver, const HostFile& file, size_t buffer_bytes, int buffers, int threads);
  // Waits for copies that still read the buffers. Never throws.
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // The order in which extents will be asked for: `once`, then `cycle` over and over. Reading ahead begins right away;
  // what was read ahead for another order is dropped. Waits for copies that still read the buffers. If the driver
  // fails, no order is followed afterwards.
  void follow(std::vector<Extent> once, std::vector<Extent> cycle);

  // Waits until the next extent of the order is read, then copies it to the device on `stream`. Failure::usage if
  // `expected` is not the next extent, Failure::host_read if it could not be read. Neither advances the order.
  void copy_next(const Extent& expected, Address to, Stream stream);

  // Copies any number of bytes, only while no order is followed. They are in place when it returns.
  void copy_now(int64_t offset_bytes, int64_t bytes, Address to, Stream stream);

  size_t host_bytes() const { return buffer_bytes_ * buffers_.size(); }
  int64_t bytes_read() const { return bytes_read_.load(std::memory_order_relaxed); }

 private:
  // Extent number q of the order goes through buffer q % buffers.
  struct Buffer {
    unsigned char* memory = nullptr;
    Event copied = nullptr;
    bool copying = false;  // `copied` is recorded after a copy that nobody has waited for yet
    int64_t holds = -1;    // the number of the extent that was read, or could not be
    Failure failure = Failure::none;
    std::string problem;
  };

  void read_ahead();
  void fill(Buffer& buffer, const Extent& extent);
  void read_extent(unsigned char* to, const Extent& extent);
  void await_copy(Buffer& buffer);
  void drop_order(std::unique_lock<std::mutex>& lock);
  void release() noexcept;
  void check(const Extent& extent) const;
  const Extent* extent_at(int64_t number) const;
  Buffer& buffer_of(int64_t number) { return buffers_[(size_t)number % buffers_.size()]; }

  Driver& driver_;
  const HostFile& file_;
  const size_t buffer_bytes_;
  std::vector<Buffer> buffers_;
  std::vector<std::thread> readers_;
  std::atomic<int64_t> bytes_read_{0};
  // Tells readers to give up what they are reading.
  std::atomic<bool> abandon_{false};

  std::mutex mutex_;
  std::condition_variable may_read_;
  std::condition_variable was_read_;
  std::vector<Extent> once_;
  std::vector<Extent> cycle_;
  int64_t next_read_ = 0;
  int64_t next_copy_ = 0;
  int reading_ = 0;
  bool stop_ = false;
};

}  // namespace penstock
