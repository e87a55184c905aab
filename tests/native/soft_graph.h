// Graphs of the soft driver: what was captured from streams, run anew by every launch.
//
// A launch runs its nodes in an order that keeps to the captured edges and to nothing else, so that an edge that was
// forgotten shows.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "driver/driver.h"
#include "soft/soft_stream.h"

namespace penstock {

struct SoftCapture;

// One recording of an event in a captured stream: what has been captured there by then.
struct SoftMark {
  std::weak_ptr<SoftCapture> capture;  // gone when the capture has ended
  std::set<size_t> nodes;
};

struct SoftNode {
  enum class Kind { copy, kernel, record, wait };
  Kind kind;
  std::function<void()> body;        // of copies and kernels
  std::shared_ptr<SoftEvent> event;  // of external records and waits
  std::vector<size_t> after;         // earlier nodes
};

struct SoftGraph {
  std::vector<SoftNode> nodes;
};

// A capture that is on. It lives until its end, and then only its nodes do.
struct SoftCapture {
  Stream origin;
  std::vector<SoftNode> nodes;
  std::map<Stream, std::set<size_t>> last;  // by stream of the capture, what its next node comes after
  std::string broken;                       // why it was invalidated; empty while it is valid
};

// The captures of a driver, and what a captured stream may not do. Whatever is refused invalidates the captures that
// it touches: nothing more can be captured, and their end fails. Functions that return whether the stream is captured
// have done the call when it is.
class SoftCaptures {
 public:
  void begin(Stream stream);
  std::shared_ptr<SoftGraph> end(Stream stream);
  bool is_on(Stream stream) const;

  bool add(Stream stream, const char* call, SoftNode node);
  // An event that is recorded outside of captures has no mark any more.
  bool record(Stream stream, Event event);
  // Also captured is a stream that waits for what was recorded in a capture.
  bool wait(Stream stream, Event event);

  // Throws when the stream is captured.
  void refuse(Stream stream, const char* call);
  // Throws when the event was last recorded in a capture: no stream will ever get there.
  void refuse_event(Event event, const char* call);
  // What is being destroyed.
  void forget(Stream stream);
  void forget_event(Event event);

 private:
  using Captured = std::shared_ptr<SoftCapture>;
  Captured of(Stream stream) const;
  Captured valid(Captured capture, const char* call) const;
  void release(const Captured& capture);

  const SoftMark* mark_of(Event event) const;

  mutable std::mutex mutex_;
  std::map<Stream, Captured> captures_;  // by stream, forked ones too
  std::map<Event, SoftMark> marks_;      // of events that were last recorded in a captured stream
};

// Which of the nodes that may run goes first. The numbers are part of the C interface.
enum class SoftOrder : int32_t {
  copies_first = 0,
  kernels_first = 1,
  random = 2,
  threads = 3,  // several at once, each taking any
};

// One launch. To make it is the launch call's part: external waits are for what their events have recorded by then.
class SoftLaunch {
 public:
  SoftLaunch(std::shared_ptr<const SoftGraph> graph, SoftOrder order, uint64_t seed, SoftPace& pace);
  SoftLaunch(const SoftLaunch&) = delete;
  SoftLaunch& operator=(const SoftLaunch&) = delete;

  // Of external records.
  std::vector<std::shared_ptr<Completion>> records() const;
  // From here on the events of external records stand for this launch.
  void announce();
  // With a fault, given or found, what is left is skipped; external waits are waited for and records completed all the
  // same. Returns it. `on`: the stream whose work this is; null: the calling thread's.
  SoftFault run(SoftFault fault, SoftStream* on);

 private:
  void work(SoftStream* on);
  SoftFault perform(size_t index, SoftFault fault);
  bool may_run(size_t index) const;
  // Takes a node out of the ready ones; none may run: the number of nodes.
  size_t take();

  const std::shared_ptr<const SoftGraph> graph_;
  const SoftOrder order_;
  SoftPace& pace_;
  std::vector<std::shared_ptr<Completion>> completions_;  // by node; null: nothing to complete or to wait for
  std::vector<std::vector<size_t>> followers_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<size_t> missing_;  // by node, how many of those before it have not ended
  std::vector<size_t> ready_;
  size_t left_;
  uint64_t random_;
  SoftFault fault_;
};

}  // namespace penstock
