// Executes a plan: fixed addresses, resident heads, ring pages that stays take in turn. All decisions stand in the plan.
#pragma once

#include "plan_records.h"
#include "streaming_session.h"

namespace penstock {

class PlannedSession final : public StreamingSession {
 public:
  PlannedSession(Driver& driver, Source& source, int32_t device_index, bool poison)
      : StreamingSession(driver, source, device_index, poison) {}
  ~PlannedSession() override { uninstall(); }

  // Creates the plan's memory and fills what is resident. Whatever it throws, nothing of the plan is left.
  void install(PlanRecord plan);
  void uninstall() noexcept;

  // Physical bytes held for weights, now and at most.
  int64_t device_bytes() const { return device_bytes_; }
  int64_t peak_device_bytes() const { return peak_device_bytes_; }

 protected:
  void begin_run(bool cold) override;
  Address lend(int64_t position) override;
  void step_ended(int64_t step) override;
  void end_run() override;
  void reset() noexcept override;

 private:
  struct MappedRange {
    Address address;
    size_t bytes;
    size_t mapped_bytes;
    bool accessible;
  };
  struct StayState {
    Event ready = nullptr;        // after the last of its copies
    std::vector<int64_t> copies;  // indices into the method's
    size_t issued = 0;            // how many of them, since it was last read to the end
    bool unread = false;
  };
  struct StepState {
    Event ended = nullptr;           // null: no copy waits for it
    std::vector<int64_t> last_read;  // stays whose pages may be overwritten after it
  };
  struct MethodState {
    std::vector<StayState> stays;
    std::vector<StepState> steps;
    std::vector<PieceRecord> entering;
    std::vector<PieceRecord> cycle;
  };

  void create_memory();
  void create_events();
  void fill_residents();
  void measure();
  void issue(int64_t copy);
  void issue_until(int64_t position);
  static void forget_copies(MethodState& method) noexcept;
  Address address_of(const PieceRecord& piece) const;

  PlanRecord plan_;
  std::vector<Block> blocks_;
  std::vector<MappedRange> ranges_;
  std::vector<MethodState> methods_;
  size_t next_copy_ = 0;
  int64_t device_bytes_ = 0;
  int64_t peak_device_bytes_ = 0;
};

}  // namespace penstock
