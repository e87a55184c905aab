// Giving things back, whatever else fails.
#pragma once

#include <utility>

#include "driver/driver.h"

namespace penstock {

// Runs what gives something back. It may be called because another call failed, or because the device is lost: what it
// throws is not news, whatever it is, and must not keep the next thing from being given back.
template <typename Action>
void quietly(Action&& action) noexcept {
  try {
    action();
  } catch (...) {
  }
}

// Waits for what uses something, before that is given back. Twice: drivers also report the failure of earlier work
// here, without having waited. A second failure means that the device is lost, and with it whatever was at work.
template <typename Wait>
void sync_with_retry(Wait&& wait) noexcept {
  try {
    wait();
  } catch (...) {
    quietly(wait);
  }
}

// Gives back on the way out, unless kept.
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
