// Counts the calls of a soft driver and lets a test make one of them fail. Always compiled: one lock per call.
#pragma once

#include <cerrno>
#include <cstdint>
#include <mutex>
#include <string>

#include "driver/driver.h"

namespace penstock {

class SoftCalls {
 public:
  // The countdown-th call from now fails, counting only calls named `only` unless that is empty. Failure::none means
  // the failure that is natural for the call. A countdown of 0 takes the order back.
  void fail_at(uint64_t countdown, Failure failure, const std::string& only) {
    std::lock_guard<std::mutex> lock(mutex_);
    countdown_ = countdown;
    failure_ = failure;
    only_ = only;
    failed_ = "";
  }

  // For calls that make or use something: nothing has been done when this throws.
  void count(const char* call, Failure natural = Failure::driver) {
    Failure failure = Failure::none;
    if (due(call, natural, &failure)) throw_injected(call, failure);
  }

  // For calls that give something back: these release first and report afterwards, as a failing destroy does, so that
  // the counters of live objects tell leaks from failures.
  class Late {
   public:
    Late(SoftCalls& calls, const char* call, Failure natural = Failure::driver) : call_(call) {
      calls.due(call, natural, &failure_);
    }
    void report() const {
      if (failure_ != Failure::none) throw_injected(call_, failure_);
    }

   private:
    const char* call_;
    Failure failure_ = Failure::none;
  };

  uint64_t total() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return total_;
  }

  // The name of the call that was made to fail; empty while none was.
  const char* failed() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return failed_;
  }

 private:
  [[noreturn]] static void throw_injected(const char* call, Failure failure) {
    throw DriverError(failure, std::string("soft ") + call, ECANCELED, "a test asked for this failure");
  }

  bool due(const char* call, Failure natural, Failure* out) {
    std::lock_guard<std::mutex> lock(mutex_);
    total_++;
    if (countdown_ == 0 || (!only_.empty() && only_ != call) || --countdown_ != 0) return false;
    failed_ = call;
    *out = failure_ == Failure::none ? natural : failure_;
    return true;
  }

  mutable std::mutex mutex_;
  uint64_t total_ = 0;
  uint64_t countdown_ = 0;
  Failure failure_ = Failure::none;
  std::string only_;
  const char* failed_ = "";
};

}  // namespace penstock
