// The reader threads, and the ring of buffers between them and the copies (S10).
#include "host/staging.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "driver/cleanup.h"

namespace penstock {
namespace {

// Between two parts a reader checks whether its order is still wanted: dropping an order must not wait for a slow disk.
constexpr size_t kReadPartBytes = (size_t)4 << 20;

std::string extent_text(const Extent& extent) {
  return "bytes " + std::to_string(extent.offset_bytes) + " to " + std::to_string(extent.offset_bytes + extent.bytes);
}

}  // namespace

Staging::Staging(Driver& driver, const HostFile& file, size_t buffer_bytes, int buffers, int threads)
    : driver_(driver), file_(file), buffer_bytes_(buffer_bytes) {
  if (!buffer_bytes || buffers < 1 || threads < 1)
    throw CoreError(Failure::usage, "staging needs at least 1 byte, 1 buffer and 1 thread, not " +
                                        std::to_string(buffer_bytes) + " bytes, " + std::to_string(buffers) +
                                        " buffers and " + std::to_string(threads) + " threads");
  buffers_.resize((size_t)buffers);
  Entered entered(driver_);
  size_t made = 0;
  try {
    for (Buffer& buffer : buffers_) {
      buffer.memory = static_cast<unsigned char*>(driver_.allocate_host(buffer_bytes_));
      buffer.copied = driver_.create_event(false);
      made++;
    }
    for (int i = 0; i < threads; ++i) readers_.emplace_back([this] { read_ahead(); });
  } catch (const CoreError& error) {
    release();
    if (error.failure == Failure::sticky) throw;
    throw CoreError(Failure::registration,
                    "staging for weights file " + file.path() + ": pinned buffer " + std::to_string(made + 1) + " of " +
                        std::to_string(buffers) + ", " + std::to_string(buffer_bytes) +
                        " bytes each, could not be had: " + error.what() + "; give a smaller cap of host memory");
  } catch (const std::system_error& error) {
    size_t started = readers_.size();
    release();
    throw CoreError(Failure::host_read, "staging for weights file " + file.path() + ": reader thread " +
                                            std::to_string(started + 1) + " of " + std::to_string(threads) +
                                            " could not be started: " + error.what());
  }
}

Staging::~Staging() { release(); }

void Staging::release() noexcept {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    abandon_ = true;
  }
  may_read_.notify_all();
  for (std::thread& reader : readers_) reader.join();
  readers_.clear();
  bool entered = false;
  quietly([&] {
    driver_.enter();
    entered = true;
  });
  for (Buffer& buffer : buffers_) {
    // Twice: a driver may report the failure of earlier work here without having waited. A second failure means that
    // the device is lost, and with it the copy.
    quietly([&] { await_copy(buffer); });
    quietly([&] { await_copy(buffer); });
    if (buffer.copied) quietly([&] { driver_.destroy_event(buffer.copied); });
    if (buffer.memory) quietly([&] { driver_.free_host(buffer.memory); });
    buffer = Buffer();
  }
  if (entered) driver_.leave();
}

void Staging::check(const Extent& extent) const {
  if (extent.bytes < 1 || (uint64_t)extent.bytes > buffer_bytes_)
    throw CoreError(Failure::usage, extent_text(extent) + " of weights file " + file_.path() +
                                        " do not fit a staging buffer of " + std::to_string(buffer_bytes_) + " bytes");
  if (extent.offset_bytes < 0 || extent.offset_bytes > (int64_t)file_.bytes() - extent.bytes)
    throw CoreError(Failure::usage, extent_text(extent) + " do not lie in weights file " + file_.path() + " of " +
                                        std::to_string(file_.bytes()) + " bytes");
}

const Extent* Staging::extent_at(int64_t number) const {
  if (number < (int64_t)once_.size()) return &once_[(size_t)number];
  if (cycle_.empty()) return nullptr;
  return &cycle_[((size_t)number - once_.size()) % cycle_.size()];
}

void Staging::follow(std::vector<Extent> once, std::vector<Extent> cycle) {
  for (const Extent& extent : once) check(extent);
  for (const Extent& extent : cycle) check(extent);
  Entered entered(driver_);
  std::unique_lock<std::mutex> lock(mutex_);
  drop_order(lock);
  once_ = std::move(once);
  cycle_ = std::move(cycle);
  lock.unlock();
  may_read_.notify_all();
}

void Staging::drop_order(std::unique_lock<std::mutex>& lock) {
  once_.clear();
  cycle_.clear();
  abandon_ = true;
  was_read_.wait(lock, [this] { return reading_ == 0; });
  abandon_ = false;
  for (Buffer& buffer : buffers_) {
    await_copy(buffer);
    buffer.holds = -1;
    buffer.failure = Failure::none;
    buffer.problem.clear();
  }
  next_read_ = next_copy_ = 0;
}

void Staging::copy_next(const Extent& expected, Address to, Stream stream) {
  std::unique_lock<std::mutex> lock(mutex_);
  const Extent* next = extent_at(next_copy_);
  if (!next)
    throw CoreError(Failure::usage, "staging was asked for " + extent_text(expected) + " of weights file " +
                                        file_.path() + " after the last extent of its order");
  if (next->offset_bytes != expected.offset_bytes || next->bytes != expected.bytes)
    throw CoreError(Failure::usage, "staging was asked for " + extent_text(expected) + " of weights file " +
                                        file_.path() + " where " + extent_text(*next) + " are due");
  Buffer& buffer = buffer_of(next_copy_);
  was_read_.wait(lock, [&] { return buffer.holds == next_copy_; });
  if (buffer.failure != Failure::none) throw CoreError(buffer.failure, buffer.problem);
  lock.unlock();
  Entered entered(driver_);
  try {
    driver_.copy_to_device(to, buffer.memory, (size_t)expected.bytes, stream);
    driver_.record(buffer.copied, stream);
  } catch (const CoreError&) {
    // S10: the copy may be in flight without an event that marks its end. The first error is the one to report.
    quietly([&] { driver_.synchronize_stream(stream); });
    throw;
  }
  lock.lock();
  buffer.copying = true;
  next_copy_++;
  lock.unlock();
  may_read_.notify_one();
}

void Staging::copy_now(int64_t offset_bytes, int64_t bytes, Address to, Stream stream) {
  if (!once_.empty() || !cycle_.empty())
    throw CoreError(Failure::usage, "staging was asked for " + extent_text({offset_bytes, bytes}) +
                                        " of weights file " + file_.path() + " outside the order that it follows");
  std::vector<Extent> parts;
  for (int64_t at = 0; at < bytes; at += (int64_t)buffer_bytes_)
    parts.push_back({offset_bytes + at, std::min(bytes - at, (int64_t)buffer_bytes_)});
  try {
    follow(parts, {});
    for (const Extent& part : parts) copy_next(part, to + (Address)(part.offset_bytes - offset_bytes), stream);
  } catch (const CoreError&) {
    // The order must not outlive the call; the first error is the one to report.
    quietly([&] { follow({}, {}); });
    throw;
  }
  follow({}, {});
}

void Staging::read_ahead() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    may_read_.wait(lock, [this] {
      return stop_ || (!abandon_ && extent_at(next_read_) && next_read_ < next_copy_ + (int64_t)buffers_.size());
    });
    if (stop_) return;
    int64_t number = next_read_++;
    Extent extent = *extent_at(number);
    Buffer& buffer = buffer_of(number);
    reading_++;
    lock.unlock();
    fill(buffer, extent);
    lock.lock();
    buffer.holds = number;
    reading_--;
    was_read_.notify_all();
  }
}

void Staging::fill(Buffer& buffer, const Extent& extent) {
  try {
    Entered entered(driver_);
    await_copy(buffer);
    read_extent(buffer.memory, extent);
  } catch (const CoreError& error) {
    buffer.failure = error.failure;
    buffer.problem = error.what();
  } catch (const std::exception& error) {
    // No exception may leave a thread.
    buffer.failure = Failure::host_read;
    buffer.problem = error.what();
  }
}

// S10: nothing is read into a buffer before the copy out of it has ended.
void Staging::await_copy(Buffer& buffer) {
  if (!buffer.copying) return;
  driver_.synchronize_event(buffer.copied);
  buffer.copying = false;
}

void Staging::read_extent(unsigned char* to, const Extent& extent) {
  // The kernel's own read-ahead does not know the order, so this asks for the whole extent at once.
  ::posix_fadvise(file_.fd(), extent.offset_bytes, extent.bytes, POSIX_FADV_WILLNEED);
  int64_t done = 0;
  while (done < extent.bytes && !abandon_.load(std::memory_order_relaxed)) {
    size_t part = std::min(kReadPartBytes, (size_t)(extent.bytes - done));
    ssize_t got = ::pread(file_.fd(), to + done, part, extent.offset_bytes + done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0)
      throw CoreError(Failure::host_read, extent_text(extent) + " of weights file " + file_.path() +
                                              " could not be read: " + std::system_category().message(errno) +
                                              " (errno " + std::to_string(errno) + ")");
    if (got == 0)
      throw CoreError(Failure::host_read, "weights file " + file_.path() + " was truncated: it had " +
                                              std::to_string(file_.bytes()) + " bytes and now ends at " +
                                              std::to_string(extent.offset_bytes + done) + ", where " +
                                              extent_text(extent) + " are needed");
    done += got;
    bytes_read_.fetch_add(got, std::memory_order_relaxed);
  }
}

}  // namespace penstock
