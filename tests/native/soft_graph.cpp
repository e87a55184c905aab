// What becomes a node while a stream is captured, and the orders in which a launch runs the nodes.
#include "soft_graph.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <thread>
#include <utility>

namespace penstock {
namespace {

constexpr int kHelpers = 2;
constexpr std::chrono::microseconds kPoll{50};

[[noreturn]] void fail(const char* call, const std::string& text) {
  throw DriverError(Failure::capture, std::string("soft ") + call, EPERM, text);
}

void invalidate(SoftCapture& capture, const std::string& text) {
  if (capture.broken.empty()) capture.broken = text;
}

[[noreturn]] void fail(SoftCapture& capture, const char* call, const std::string& text) {
  invalidate(capture, text);
  fail(call, text);
}

}  // namespace

SoftCaptures::Captured SoftCaptures::of(Stream stream) const {
  auto found = captures_.find(stream);
  return found == captures_.end() ? nullptr : found->second;
}

SoftCaptures::Captured SoftCaptures::valid(Captured capture, const char* call) const {
  if (capture && !capture->broken.empty()) fail(call, "the capture was invalidated: " + capture->broken);
  return capture;
}

void SoftCaptures::release(const Captured& capture) {
  for (const auto& [stream, last] : capture->last) captures_.erase(stream);
}

void SoftCaptures::begin(Stream stream) {
  if (!stream) fail("begin_capture", "the calling thread as a stream cannot be captured");
  std::lock_guard<std::mutex> lock(mutex_);
  if (auto capture = of(stream)) fail(*capture, "begin_capture", "the stream is being captured already");
  auto capture = std::make_shared<SoftCapture>();
  capture->origin = stream;
  capture->last[stream];
  captures_[stream] = std::move(capture);
}

std::shared_ptr<SoftGraph> SoftCaptures::end(Stream stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto capture = of(stream);
  if (!capture) fail("end_capture", "the stream is not being captured");
  if (capture->origin != stream) fail(*capture, "end_capture", "the capture began on another stream");
  release(capture);
  valid(capture, "end_capture");
  // Edges lead to earlier nodes only, so one pass from the back finds all that the origin comes after.
  std::vector<bool> joined(capture->nodes.size());
  for (size_t index : capture->last[stream]) joined[index] = true;
  for (size_t index = joined.size(); index-- > 0;)
    if (joined[index])
      for (size_t before : capture->nodes[index].after) joined[before] = true;
  for (const auto& [forked, last] : capture->last)
    for (size_t index : last)
      if (!joined[index])
        fail("end_capture", "the stream the capture began on does not wait for node " + std::to_string(index) + " of " +
                                std::to_string(joined.size()) + ", the last of a stream that was forked from it");
  return std::make_shared<SoftGraph>(SoftGraph{std::move(capture->nodes)});
}

bool SoftCaptures::is_on(Stream stream) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return of(stream) != nullptr;
}

bool SoftCaptures::add(Stream stream, const char* call, SoftNode node) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto capture = valid(of(stream), call);
  if (!capture) return false;
  auto& last = capture->last[stream];
  node.after.assign(last.begin(), last.end());
  last = {capture->nodes.size()};
  capture->nodes.push_back(std::move(node));
  return true;
}

const SoftMark* SoftCaptures::mark_of(Event event) const {
  auto found = marks_.find(event);
  return found == marks_.end() ? nullptr : &found->second;
}

bool SoftCaptures::record(Stream stream, Event event) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto capture = valid(of(stream), "record");
  if (!capture) {
    marks_.erase(event);
    return false;
  }
  marks_[event] = {capture, capture->last[stream]};
  return true;
}

bool SoftCaptures::wait(Stream stream, Event event) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto capture = valid(of(stream), "wait");
  const SoftMark* mark = mark_of(event);
  if (!capture && !mark) return false;
  // An event that was never recorded too: outside a capture it is no wait, inside it can only be a mistake.
  if (!mark) fail(*capture, "wait", "a captured stream may not wait for an event not recorded in its capture");
  auto source = mark->capture.lock();
  if (!source) {
    const std::string text = "the event was last recorded in a capture that has ended";
    if (capture) fail(*capture, "wait", text);
    fail("wait", text);
  }
  if (capture && source != capture) {
    invalidate(*source, "a stream of another capture waited for an event of this one");
    fail(*capture, "wait", "a captured stream may not wait for an event that was recorded in another capture");
  }
  valid(source, "wait");
  if (!stream) fail(*source, "wait", "the calling thread as a stream may not wait for an event of a capture");
  source->last[stream].insert(mark->nodes.begin(), mark->nodes.end());
  captures_[stream] = std::move(source);
  return true;
}

void SoftCaptures::refuse(Stream stream, const char* call) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (auto capture = valid(of(stream), call)) fail(*capture, call, std::string(call) + " on a stream being captured");
}

void SoftCaptures::refuse_event(Event event, const char* call) {
  std::lock_guard<std::mutex> lock(mutex_);
  const SoftMark* mark = mark_of(event);
  if (!mark) return;
  const std::string text = "the event was last recorded in a capture";
  if (auto capture = mark->capture.lock()) invalidate(*capture, std::string(call) + " on an event of the capture");
  fail(call, text);
}

void SoftCaptures::forget(Stream stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto capture = of(stream);
  if (!capture) return;
  invalidate(*capture, "a stream of the capture was destroyed");
  // Without the stream it began on, nobody can end it.
  if (capture->origin == stream) return release(capture);
  captures_.erase(stream);
  capture->last.erase(stream);
}

void SoftCaptures::forget_event(Event event) {
  std::lock_guard<std::mutex> lock(mutex_);
  marks_.erase(event);
}

SoftLaunch::SoftLaunch(std::shared_ptr<const SoftGraph> graph, SoftOrder order, uint64_t seed, SoftPace& pace)
    : graph_(std::move(graph)),
      order_(order),
      pace_(pace),
      completions_(graph_->nodes.size()),
      followers_(graph_->nodes.size()),
      missing_(graph_->nodes.size()),
      left_(graph_->nodes.size()),
      random_(seed) {
  for (size_t index = 0; index < left_; ++index) {
    const SoftNode& node = graph_->nodes[index];
    for (size_t before : node.after) followers_[before].push_back(index);
    missing_[index] = node.after.size();
    if (node.after.empty()) ready_.push_back(index);
    if (node.kind == SoftNode::Kind::record) completions_[index] = std::make_shared<Completion>(pace_);
    if (node.kind == SoftNode::Kind::wait) completions_[index] = node.event->latest();
  }
}

std::vector<std::shared_ptr<Completion>> SoftLaunch::records() const {
  std::vector<std::shared_ptr<Completion>> records;
  for (size_t index = 0; index < completions_.size(); ++index)
    if (graph_->nodes[index].kind == SoftNode::Kind::record) records.push_back(completions_[index]);
  return records;
}

void SoftLaunch::announce() {
  for (size_t index = 0; index < completions_.size(); ++index)
    if (graph_->nodes[index].kind == SoftNode::Kind::record) graph_->nodes[index].event->record(completions_[index]);
}

SoftFault SoftLaunch::run(SoftFault fault, SoftStream* on) {
  fault_ = std::move(fault);
  std::vector<std::thread> helpers;
  try {
    if (order_ == SoftOrder::threads)
      while (helpers.size() < kHelpers) helpers.emplace_back([this] { work(nullptr); });
  } catch (const std::system_error& error) {
    std::lock_guard<std::mutex> lock(mutex_);
    fault_ = std::make_shared<DriverError>(Failure::driver, "soft launch_graph", error.code().value(),
                                           std::string("no thread is to be had: ") + error.what());
  }
  work(on);
  for (auto& helper : helpers) helper.join();
  return fault_;
}

void SoftLaunch::work(SoftStream* on) {
  const auto rest = [on](auto wait) { on ? on->while_resting(wait) : wait(); };
  std::unique_lock<std::mutex> lock(mutex_);
  while (left_ != 0) {
    const size_t index = take();
    if (index == completions_.size()) {
      if (ready_.empty()) {
        rest([&] { changed_.wait(lock, [this] { return left_ == 0 || !ready_.empty(); }); });
      } else {
        // What completes an external wait does not know of this launch. Nothing else is left to do: what is late may come.
        const std::vector<size_t> held = ready_;
        lock.unlock();
        for (size_t waiting : held) completions_[waiting]->demand();
        rest([] { std::this_thread::sleep_for(kPoll); });
        lock.lock();
      }
      continue;
    }
    SoftFault fault = fault_;
    lock.unlock();
    pace_.delays.pause();
    fault = perform(index, std::move(fault));
    lock.lock();
    if (!fault_) fault_ = std::move(fault);
    for (size_t follower : followers_[index])
      if (--missing_[follower] == 0) ready_.push_back(follower);
    left_--;
    changed_.notify_all();
  }
}

SoftFault SoftLaunch::perform(size_t index, SoftFault fault) {
  const SoftNode& node = graph_->nodes[index];
  switch (node.kind) {
    case SoftNode::Kind::record:
      completions_[index]->complete(fault);
      return fault;
    case SoftNode::Kind::wait: {
      SoftFault awaited = completions_[index] ? completions_[index]->await() : nullptr;
      return fault ? fault : awaited;
    }
    default:
      return fault ? fault : fault_of(node.body);
  }
}

bool SoftLaunch::may_run(size_t index) const {
  if (graph_->nodes[index].kind != SoftNode::Kind::wait || !completions_[index]) return true;
  SoftFault fault;
  int64_t time_ns;
  return completions_[index]->is_complete(&fault, &time_ns);
}

size_t SoftLaunch::take() {
  std::vector<size_t> takable;
  for (size_t index : ready_)
    if (may_run(index)) takable.push_back(index);
  if (takable.empty()) return completions_.size();
  size_t taken;
  if (order_ == SoftOrder::copies_first || order_ == SoftOrder::kernels_first) {
    const auto favoured = order_ == SoftOrder::copies_first ? SoftNode::Kind::copy : SoftNode::Kind::kernel;
    const auto rank = [this, favoured](size_t index) {
      const auto kind = graph_->nodes[index].kind;
      if (kind == favoured) return 0;
      // Those of events early too: a wait leads on, a record that comes too soon sets others free.
      return kind == SoftNode::Kind::wait ? 1 : kind == SoftNode::Kind::record ? 2 : 3;
    };
    // Of equals the one captured last, the opposite of what the capturing program did.
    taken = *std::min_element(takable.begin(), takable.end(), [&rank](size_t one, size_t other) {
      return rank(one) != rank(other) ? rank(one) < rank(other) : one > other;
    });
  } else {
    taken = takable[split_mix(random_) % takable.size()];
  }
  ready_.erase(std::find(ready_.begin(), ready_.end(), taken));
  return taken;
}

}  // namespace penstock
