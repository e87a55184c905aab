// Cleanup that continues whatever else fails.
#pragma once

#include <utility>

#include "driver/driver.h"

namespace penstock {

// Runs one cleanup action and drops whatever it throws. It may run because another call failed or because the device is
// lost. So a failure here is no news, and must not keep the next thing from being given back.
template <typename Action>
void quietly(Action&& action) noexcept {
  try {
    action();
  } catch (...) {
  }
}

// Waits until nothing uses a resource any more, before it is given back. Tries twice: a driver may report the failure
// of earlier work here without having waited. A second failure means that the device is lost, with all work on it.
template <typename Wait>
void sync_with_retry(Wait&& wait) noexcept {
  try {
    wait();
  } catch (...) {
    quietly(wait);
  }
}

// Runs the action on the way out of the scope, unless kept.
template <typename Action>
class Undo {
 public:
  explicit Undo(Action action) : action_(std::move(action)) {}
  ~Undo() {
    if (armed_) quietly(action_);
  }
  Undo(const Undo&) = delete;
  Undo& operator=(const Undo&) = delete;
  void keep() { armed_ = false; }

 private:
  Action action_;
  bool armed_ = true;
};

// Makes the driver's device current while it lives.
class Entered {
 public:
  explicit Entered(Driver& driver) : driver_(driver) { driver_.enter(); }
  ~Entered() { driver_.leave(); }
  Entered(const Entered&) = delete;
  Entered& operator=(const Entered&) = delete;

 private:
  Driver& driver_;
};

}  // namespace penstock
