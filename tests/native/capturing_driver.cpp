#include "capturing_driver.h"

#include <cerrno>
#include <string>
#include <utility>

namespace penstock {
namespace {

[[noreturn]] void fail(const char* call, const std::string& text) {
  throw DriverError(Failure::driver, std::string("soft ") + call, EINVAL, text);
}

}  // namespace

CapturingDriver::~CapturingDriver() { finish_streams(); }

Address CapturingDriver::pool_allocate(Pool pool, size_t bytes, Stream stream) {
  captures_.refuse(stream, "pool_allocate");
  return SoftDriver::pool_allocate(pool, bytes, stream);
}

void CapturingDriver::pool_release(Pool pool, Address address, Stream stream) {
  captures_.refuse(stream, "pool_release");
  SoftDriver::pool_release(pool, address, stream);
}

void CapturingDriver::destroy_stream(Stream stream) {
  SoftDriver::destroy_stream(stream);
  captures_.forget(stream);
}

void CapturingDriver::synchronize_stream(Stream stream) {
  captures_.refuse(stream, "synchronize_stream");
  SoftDriver::synchronize_stream(stream);
}

void CapturingDriver::destroy_event(Event event) {
  SoftDriver::destroy_event(event);
  captures_.forget_event(event);
}

void CapturingDriver::record(Event event, Stream stream) {
  event_of(event, "record");
  queue_of(stream, "record");
  if (!captures_.record(stream, event)) SoftDriver::record(event, stream);
}

void CapturingDriver::record_external(Event event, Stream stream) {
  auto recorded = event_of(event, "record_external");
  queue_of(stream, "record_external");
  if (captures_.add(stream, "record_external", {SoftNode::Kind::record, nullptr, recorded, {}})) return;
  captures_.forget_event(event);
  SoftDriver::record(event, stream);
}

void CapturingDriver::wait(Stream stream, Event event) {
  queue_of(stream, "wait");
  event_of(event, "wait");
  if (!captures_.wait(stream, event)) SoftDriver::wait(stream, event);
}

void CapturingDriver::wait_external(Stream stream, Event event) {
  queue_of(stream, "wait_external");
  auto recorded = event_of(event, "wait_external");
  if (captures_.add(stream, "wait_external", {SoftNode::Kind::wait, nullptr, recorded, {}})) return;
  if (!captures_.wait(stream, event)) SoftDriver::wait(stream, event);
}

void CapturingDriver::synchronize_event(Event event) {
  captures_.refuse_event(event, "synchronize_event");
  SoftDriver::synchronize_event(event);
}

bool CapturingDriver::is_complete(Event event) {
  captures_.refuse_event(event, "is_complete");
  return SoftDriver::is_complete(event);
}

int64_t CapturingDriver::elapsed_ns(Event from, Event to) {
  for (Event event : {from, to}) captures_.refuse_event(event, "elapsed_ns");
  return SoftDriver::elapsed_ns(from, to);
}

bool CapturingDriver::captured(Stream stream, const char* call, Work kind, const std::function<void()>& body) {
  const auto node = kind == Work::copy ? SoftNode::Kind::copy : SoftNode::Kind::kernel;
  return captures_.add(stream, call, {node, body, nullptr, {}});
}

void CapturingDriver::begin_capture(Stream stream) {
  queue_of(stream, "begin_capture");
  captures_.begin(stream);
}

Graph CapturingDriver::end_capture(Stream stream) {
  queue_of(stream, "end_capture");
  auto graph = captures_.end(stream);
  std::lock_guard<std::mutex> lock(mutex_);
  graphs_[graph.get()] = graph;
  return graph.get();
}

std::shared_ptr<SoftGraph> CapturingDriver::graph_of(Graph graph, const char* call) const {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = graphs_.find(graph);
  if (found == graphs_.end()) fail(call, "there is no such graph");
  return found->second;
}

void CapturingDriver::launch_graph(Graph graph, Stream stream, SoftOrder order, uint64_t seed) {
  auto found = graph_of(graph, "launch_graph");
  auto queue = queue_of(stream, "launch_graph");
  if (order < SoftOrder::copies_first || order > SoftOrder::threads)
    fail("launch_graph", "there is no order " + std::to_string((int32_t)order) + ", only 0 to 3");
  captures_.refuse(stream, "launch_graph");
  for (const SoftNode& node : found->nodes)
    if (node.kind == SoftNode::Kind::wait) captures_.refuse_event(node.event.get(), "launch_graph");
  auto launch = std::make_shared<SoftLaunch>(found, order, seed, pace());
  // As record does: on the stream first, which may refuse it, and then in the events.
  if (queue)
    queue->work_through([launch, on = queue.get()](SoftFault fault) { return launch->run(std::move(fault), on); },
                        launch->records());
  launch->announce();
  for (const SoftNode& node : found->nodes)
    if (node.kind == SoftNode::Kind::record) captures_.forget_event(node.event.get());
  if (queue) return;
  if (SoftFault fault = launch->run(nullptr, nullptr)) throw DriverError(*fault);
}

void CapturingDriver::destroy_graph(Graph graph) {
  // A launch that is pending holds the graph until it has been done.
  graph_of(graph, "destroy_graph");
  std::lock_guard<std::mutex> lock(mutex_);
  graphs_.erase(graph);
}

void CapturingDriver::set_order(SoftOrder order, uint64_t seed) {
  order_ = order;
  order_seed_ = seed;
}

int64_t CapturingDriver::graphs() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return (int64_t)graphs_.size();
}

}  // namespace penstock
