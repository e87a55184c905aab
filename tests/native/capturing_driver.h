// A soft driver that captures graphs, as the driver of a GPU does, and launches them in hostile orders: for tests of what a
// session captures.
#pragma once

#include "soft/soft_driver.h"
#include "soft_graph.h"

namespace penstock {

class CapturingDriver final : public SoftDriver {
 public:
  using SoftDriver::SoftDriver;
  ~CapturingDriver() override;

  bool is_capturing(Stream stream) override { return captures_.is_on(stream); }
  Address pool_allocate(Pool pool, size_t bytes, Stream stream) override;
  void pool_release(Pool pool, Address address, Stream stream) override;
  void destroy_stream(Stream stream) override;
  void synchronize_stream(Stream stream) override;
  void destroy_event(Event event) override;
  void record(Event event, Stream stream) override;
  void wait(Stream stream, Event event) override;
  void record_external(Event event, Stream stream) override;
  void wait_external(Stream stream, Event event) override;
  void synchronize_event(Event event) override;
  bool is_complete(Event event) override;
  int64_t elapsed_ns(Event from, Event to) override;

  // Work on the stream, and on those that wait for its events, is not done but becomes nodes of a graph.
  void begin_capture(Stream stream) override;
  Graph end_capture(Stream stream) override;
  // In the order that was set, at first copies first.
  void launch_graph(Graph graph, Stream stream) override { launch_graph(graph, stream, order_, order_seed_); }
  // Ordered on the stream as one piece of work. The seed is that of the orders that draw.
  void launch_graph(Graph graph, Stream stream, SoftOrder order, uint64_t seed);
  void destroy_graph(Graph graph) override;
  void set_order(SoftOrder order, uint64_t seed);
  int64_t graphs() const;

 protected:
  bool captured(Stream stream, const char* call, Work kind, const std::function<void()>& body) override;

 private:
  std::shared_ptr<SoftGraph> graph_of(Graph graph, const char* call) const;

  SoftCaptures captures_;
  mutable std::mutex mutex_;  // of the graphs
  std::map<Graph, std::shared_ptr<SoftGraph>> graphs_;
  SoftOrder order_ = SoftOrder::copies_first;
  uint64_t order_seed_ = 1;
};

}  // namespace penstock
