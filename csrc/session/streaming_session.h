// What the two policies share: it holds the compiled code to its schedule, orders runs one after the other whatever
// their stream (S8), and counts what moves (S7). A policy says where the weight of an access is.
#pragma once

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "host/source.h"
#include "session/session.h"
#include "timing/stall_meter.h"
#include "timing/trace.h"

namespace penstock {

using Counters = PenstockCounters;

// `copies` copies, one after the other, and the bytes they move over the link in all.
struct LinkRecord {
  int64_t copies;
  int64_t bytes;
  int64_t ns;
};

class StreamingSession : public Session {
 public:
  // The driver and the source outlive the session.
  StreamingSession(Driver& driver, Source& source, int32_t device_index, bool poison);
  ~StreamingSession() override;

  // What compiled code calls. Never throw: the caller is generated code.
  bool fetch(const FetchRequest& request, TensorHandle* out) override;
  void done(int64_t step) override;
  // The part of fetch without torch.
  bool acquire(int64_t number, Address* out);

  // Around the compiled code, on one thread. begin and end throw. A begin that threw leaves no run, and does not touch
  // a run that was there before. If end threw or a fetch failed, call abort.
  void begin(int64_t method, Stream compute);
  void end();
  // The run failed: waits for the device, and leaves nothing that a later run could mistake for its own. A failed
  // capture has touched nothing on the device and is forgotten.
  void abort() noexcept;

  // Captures a run into a graph, including its copies, without executing it. Returns the number by which it can be
  // replayed until it is dropped or the plan changes.
  void begin_capture(int64_t method, Stream compute);
  int64_t end_capture();
  void drop_capture(int64_t capture);

  // A run that launches a graph (S9). Other work on `compute` may come between begin and end, before the launch or
  // after it; all of it belongs to the run.
  void begin_replay(int64_t capture, Stream compute);
  void launch();
  void end_replay();

  // Throws while a run has not ended: what the run was lent must stay.
  void require_idle() const;

  // Waits until none of our work is left on the device.
  void drain();

  // Counts of the last run and of all runs. Waits for the device.
  void count(Counters* last_run, Counters* totals);

  // How long copies of real weights take, measured once when a plan or a pool is set up: first the copies that will be
  // made first, as they are, then some of each size. Empty when nothing is ever copied.
  const std::vector<LinkRecord>& link() const { return link_; }

  Stream copy_stream() const { return copy_stream_; }

  void start_trace();
  std::vector<SpanRecord> stop_trace();

 protected:
  struct Shape {
    std::vector<int64_t> numbers;
    int64_t step_count;
  };

  // A policy calls this when it is set up, and with no shapes when it is given up. Forgets the tensors of addresses
  // that no longer exist.
  void set_shapes(std::vector<Shape> shapes);

  // Before memory is given back: waits until none of our work is left, even in a run that has not ended.
  void finish() noexcept;

  // `cold`: the last run was of another method, or failed.
  virtual void begin_run(bool cold) = 0;
  virtual Address acquire(int64_t position) = 0;
  virtual void step_ended(int64_t step) = 0;
  virtual void end_run() = 0;
  // After drain, when a run failed.
  virtual void reset() noexcept = 0;

  // Around the compiled code while it is captured; `capture_failed` also when capture_begins threw.
  virtual void capture_begins() = 0;
  virtual void capture_ends() = 0;
  virtual void capture_failed() noexcept = 0;
  // Adds what only the device has counted, for the last run and for all. None of our work is left when this is called.
  virtual void add_device_counts(Counters*, Counters*) {}

  // Before and after the launch.
  virtual void replay_begins(bool cold) = 0;
  virtual void replay_ends() = 0;

  // The schedule position of an access that was fetched in this run; throws if it was not.
  int64_t fetched_position(int64_t number) const;

  // The method of the last run; -1 if it failed or there was none.
  int64_t last_method() const { return owner_; }

  // Makes the compute stream wait for a copy, and measures the wait.
  void wait_for_copy(Event ready);

  // Times copies to addresses that hold nothing yet. With poison on, what it copied is poison again afterwards.
  using Copies = std::vector<std::pair<PieceRecord, Address>>;
  void measure_link(const Copies& copies);

  Driver& driver_;
  Source& source_;
  const bool poison_;
  Stream copy_stream_ = nullptr;
  Stream compute_ = nullptr;
  int64_t method_ = -1;
  Event run_end_ = nullptr;
  bool has_run_ = false;
  Counters run_;
  std::unique_ptr<Trace> trace_;
  int64_t run_number_ = 0;

 private:
  struct CachedTensor {
    Address address = 0;
    TensorHandle tensor = nullptr;
  };

  enum class Mode { idle, run, capture, replay };
  struct Capture {
    int64_t method;
    Graph graph;
  };

  void start(Mode mode, int64_t method, Stream compute);
  // Returns whether the run is cold.
  bool follow_last_run();
  void require_complete() const;
  void conclude();
  void leave_capture() noexcept;
  LinkRecord time_copies(const Copies& copies);
  const Capture& capture(int64_t number) const;
  bool lends() const { return mode_ == Mode::run || mode_ == Mode::capture; }
  void forget_tensors() noexcept;
  TensorHandle tensor_at(int64_t position, Address address, const FetchRequest& request);

  int32_t device_index_;
  std::vector<Shape> shapes_;
  std::vector<std::vector<CachedTensor>> tensors_;
  StallMeter stalls_;
  Counters totals_;
  std::vector<LinkRecord> link_;
  int64_t owner_ = -1;  // the method whose copies are ahead; -1: none
  int64_t position_ = 0;
  int64_t step_ = 0;
  Mode mode_ = Mode::idle;
  std::map<int64_t, Capture> captures_;  // of the current plan
  int64_t next_capture_ = 0;             // no number is given out twice
  Graph graph_ = nullptr;                // the one being replayed
  Counters before_capture_run_;  // a capture is not a run: counts of the last run are kept
};

}  // namespace penstock
