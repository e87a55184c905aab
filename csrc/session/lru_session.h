// The other policy: weights in a capped pool, allocated one by one, with least-recently-used eviction; the next access
// is copied ahead. All pool calls go to the copy stream, so a released block can serve the next allocation of its size
// at once, whether or not the kernels ahead of it have ended. A pool can merge several blocks into one only when their
// releases have completed. Then the host waits for them (S1 holds either way), and only what still does not fit is a
// shortage.
#pragma once

#include "plan/plan_records.h"
#include "session/streaming_session.h"

namespace penstock {

class LruSession final : public StreamingSession {
 public:
  LruSession(Driver& driver, Source& source, int32_t device_index, bool poison)
      : StreamingSession(driver, source, device_index, poison) {}
  ~LruSession() override { uninstall(); }

  // Creates the pool, takes all its memory, warms it with one allocation per distinct size, and places pinned weights.
  void install(LruRecord record);
  void uninstall() noexcept;

  int64_t device_bytes() const { return held_bytes_; }
  // The most physical memory the pool has had, as the driver counts it.
  int64_t peak_device_bytes();

 protected:
  void begin_run(bool cold) override;
  Address acquire(int64_t position) override;
  void step_ended(int64_t step) override;
  void end_run() override;
  void reset() noexcept override;
  void capture_begins() override;
  void capture_ends() override {}
  void capture_failed() noexcept override {}
  void replay_begins(bool) override {}
  void replay_ends() override {}

 private:
  struct Held {
    Address address = 0;  // 0: not on the device
    bool unread = false;
    int64_t readers = 0;  // accesses fetched whose last step has not ended
    int64_t last_use = 0;
    Event ready = nullptr;
    Event read = nullptr;  // after its last reader
    bool has_been_read = false;
  };

  int64_t footprint_bytes(int64_t weight) const;
  // Evicts until `weight` fits; false when what is left must stay.
  bool make_room(int64_t weight);
  bool evict_one();
  bool place(int64_t weight);
  // 0 when the pool refuses and nothing is left to evict; `shortage_` then holds the pool's message.
  Address allocate(int64_t weight);
  void release(Held& held, int64_t weight);
  void warm();
  void prefetch_after(int64_t position);

  LruRecord record_;
  std::vector<Held> held_;
  // Per method and step: the positions whose last step it is.
  std::vector<std::vector<std::vector<int64_t>>> ending_;
  Pool pool_ = nullptr;
  int64_t held_bytes_ = 0;
  int64_t peak_bytes_ = 0;
  int64_t clock_ = 0;
  std::string shortage_;
};

}  // namespace penstock
