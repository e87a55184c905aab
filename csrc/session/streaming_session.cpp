// A session's modes (idle, run, capture, replay): what may be called in each, and how a failure ends one.
#include "session/streaming_session.h"

#include <algorithm>

#include "abi/torch_abi.h"
#include "driver/cleanup.h"

namespace penstock {
namespace {
std::string text(int64_t value) { return std::to_string(value); }

// Copy sizes whose rates are measured, and at most how many bytes of each. Takes milliseconds in all.
constexpr int64_t kMeasuredPieces[] = {256 << 10, 1 << 20, 4 << 20, 16 << 20};
constexpr int64_t kMeasuredPartsBytes = 64 << 20;
}  // namespace

StreamingSession::StreamingSession(Driver& driver, Source& source, int32_t device_index, bool poison)
    : driver_(driver), source_(source), poison_(poison), device_index_(device_index), stalls_(driver) {
  copy_stream_ = driver_.create_stream();
  Undo undo([&] { driver_.destroy_stream(copy_stream_); });
  run_end_ = driver_.create_event(false);
  undo.keep();
}

StreamingSession::~StreamingSession() {
  forget_tensors();
  trace_.reset();
  quietly([&] { driver_.destroy_event(run_end_); });
  quietly([&] { driver_.destroy_stream(copy_stream_); });
}

void StreamingSession::set_shapes(std::vector<Shape> shapes) {
  forget_tensors();
  shapes_ = std::move(shapes);
  tensors_.clear();
  for (const Shape& shape : shapes_) tensors_.emplace_back(shape.numbers.size());
  owner_ = -1;
  // Graphs hold addresses of the previous plan.
  for (const auto& [number, capture] : captures_) quietly([&] { driver_.destroy_graph(capture.graph); });
  captures_.clear();
}

void StreamingSession::forget_tensors() noexcept {
  for (auto& method : tensors_)
    for (CachedTensor& cached : method) {
      if (cached.tensor) torch_abi().delete_tensor_object(cached.tensor);
      cached = {};
    }
}

void StreamingSession::start(Mode mode, int64_t method, Stream compute) {
  if (mode_ != Mode::idle) throw CoreError(Failure::usage, "a run was begun while another one was not ended");
  if (method < 0 || method >= (int64_t)shapes_.size())
    throw CoreError(Failure::usage, "method " + text(method) + " was begun, there are " + text(shapes_.size()));
  if (driver_.is_capturing(compute))
    throw CoreError(Failure::capture, "the module was called while the caller's stream is being captured into a graph");
  clear_error();
  mode_ = mode;
  run_ = {};
  method_ = method;
  compute_ = compute;
  position_ = 0;
  step_ = 0;
}

void StreamingSession::begin(int64_t method, Stream compute) {
  start(Mode::run, method, compute);
  Undo undo([&] { abort(); });
  stalls_.begin_run();
  follow_last_run();
  undo.keep();
}

bool StreamingSession::follow_last_run() {
  run_number_++;
  // S8: this run follows the last one, whatever streams the two are on.
  if (has_run_) driver_.wait(compute_, run_end_);
  bool cold = owner_ != method_;
  owner_ = -1;
  begin_run(cold);
  return cold;
}

bool StreamingSession::acquire(int64_t number, Address* out) {
  if (!error().empty()) return false;
  if (!lends()) return fail("access " + text(number) + " was fetched outside of a run", Failure::usage);
  const Shape& shape = shapes_[method_];
  if (position_ >= (int64_t)shape.numbers.size())
    return fail("access " + text(number) + " was fetched after the last recorded one");
  if (shape.numbers[position_] != number)
    return fail("the schedule diverges at position " + text(position_) + ": expected access " +
                text(shape.numbers[position_]) + ", got access " + text(number));
  try {
    *out = acquire(position_);
    if (trace_) trace_->step_begins(run_number_, method_, step_, compute_);
  } catch (const CoreError& failure) {
    return fail(failure.what(), failure.failure);
  } catch (const std::exception& failure) {  // out of memory: generated code must not see exceptions
    return fail(failure.what(), Failure::usage);
  }
  position_++;
  return true;
}

bool StreamingSession::fetch(const FetchRequest& request, TensorHandle* out) {
  Address address = 0;
  int64_t position = position_;
  if (!acquire(request.access, &address)) return false;
  TensorHandle tensor = tensor_at(position, address, request);
  if (!tensor || torch_abi().new_tensor_handle(tensor, out))
    return fail("torch could not make a tensor for access " + text(request.access), Failure::torch);
  return true;
}

TensorHandle StreamingSession::tensor_at(int64_t position, Address address, const FetchRequest& request) {
  CachedTensor& cached = tensors_[method_][position];
  if (cached.tensor && cached.address == address) return cached.tensor;
  if (cached.tensor) torch_abi().delete_tensor_object(cached.tensor);
  cached = {};
  std::vector<int64_t> strides(request.rank);
  int64_t step = 1;
  for (int64_t d = request.rank - 1; d >= 0; --d) {
    strides[d] = step;
    step *= request.sizes[d] > 0 ? request.sizes[d] : 1;
  }
  // Use the session's own device: compiled code carries the number of the device it was compiled on.
  int32_t index = request.device_type == torch_abi().device_type_cpu() ? request.device_index : device_index_;
  TensorHandle tensor = nullptr;
  if (torch_abi().create_tensor_from_blob(reinterpret_cast<void*>(address), request.rank, request.sizes,
                                          strides.data(), 0, request.dtype, request.device_type, index, &tensor))
    return nullptr;
  cached = {address, tensor};
  return tensor;
}

int64_t StreamingSession::fetched_position(int64_t number) const {
  if (lends())
    for (int64_t position = position_ - 1; position >= 0; --position)
      if (shapes_[method_].numbers[position] == number) return position;
  throw CoreError(Failure::divergence, "access " + text(number) + " was multiplied with before it was fetched");
}

void StreamingSession::done(int64_t step) {
  if (!error().empty()) return;
  if (!lends()) {
    fail("step " + text(step) + " was ended outside of a run", Failure::usage);
    return;
  }
  if (step != step_) {
    fail("the schedule diverges: expected the end of step " + text(step_) + ", got the end of step " + text(step));
    return;
  }
  try {
    if (trace_) trace_->step_ends(run_number_, method_, step, compute_);
    step_ended(step);
  } catch (const CoreError& failure) {
    fail(failure.what(), failure.failure);
  } catch (const std::exception& failure) {
    fail(failure.what(), Failure::usage);
  }
  step_++;
}

void StreamingSession::require_complete() const {
  if (!error().empty()) throw CoreError(failure(), error());
  const Shape& shape = shapes_[method_];
  if (position_ != (int64_t)shape.numbers.size() || step_ != shape.step_count)
    throw CoreError(Failure::divergence, "the schedule diverges: expected " + text(shape.numbers.size()) +
                                             " accesses and " + text(shape.step_count) + " steps, got " +
                                             text(position_) + " and " + text(step_));
}

void StreamingSession::end() {
  if (mode_ != Mode::run) throw CoreError(Failure::usage, "a run was ended that was not begun");
  require_complete();
  end_run();
  conclude();
}

void StreamingSession::conclude() {
  driver_.record(run_end_, compute_);
  has_run_ = true;
  owner_ = method_;
  mode_ = Mode::idle;
  run_.runs = 1;
  totals_.runs += 1;
  totals_.bytes_streamed += run_.bytes_streamed;
  totals_.bytes_hit += run_.bytes_hit;
  totals_.copies += run_.copies;
  totals_.pool_calls += run_.pool_calls;
  totals_.pool_ns += run_.pool_ns;
  totals_.replays += run_.replays;
  totals_.bytes_in_place += run_.bytes_in_place;
  totals_.bytes_decoded += run_.bytes_decoded;
}

void StreamingSession::begin_capture(int64_t method, Stream compute) {
  if (trace_) throw CoreError(Failure::usage, "a run was to be captured while a trace, which tells steps apart, is on");
  Counters last = run_;
  start(Mode::capture, method, compute);
  before_capture_run_ = last;
  Undo undo([&] { leave_capture(); });
  driver_.begin_capture(compute);
  undo.keep();
  Undo abandon([&] { abort(); });
  capture_begins();
  abandon.keep();
}

int64_t StreamingSession::end_capture() {
  if (mode_ != Mode::capture) throw CoreError(Failure::usage, "a capture was ended that was not begun");
  require_complete();
  capture_ends();
  // Whatever the result, the stream is not captured any more.
  leave_capture();
  Graph graph = driver_.end_capture(compute_);
  captures_[next_capture_] = {method_, graph};
  return next_capture_++;
}

void StreamingSession::leave_capture() noexcept {
  run_ = before_capture_run_;
  mode_ = Mode::idle;
}

const StreamingSession::Capture& StreamingSession::capture(int64_t number) const {
  auto found = captures_.find(number);
  if (found == captures_.end())
    throw CoreError(Failure::usage, "there is no capture " + text(number) + "; the present plan has " +
                                        text(captures_.size()));
  return found->second;
}

void StreamingSession::drop_capture(int64_t number) {
  if (mode_ != Mode::idle) throw CoreError(Failure::usage, "a capture was to be dropped while a run has not ended");
  Graph graph = capture(number).graph;
  captures_.erase(number);
  driver_.destroy_graph(graph);
}

void StreamingSession::begin_replay(int64_t number, Stream compute) {
  if (trace_) throw CoreError(Failure::usage, "a graph was to be replayed while a trace, which tells steps apart, is on");
  Capture replayed = capture(number);
  start(Mode::replay, replayed.method, compute);
  graph_ = replayed.graph;
  Undo undo([&] { abort(); });
  replay_begins(follow_last_run());
  undo.keep();
}

void StreamingSession::launch() {
  if (mode_ != Mode::replay || !graph_) throw CoreError(Failure::usage, "a graph was launched outside of its replay");
  driver_.launch_graph(graph_, compute_);
  graph_ = nullptr;
}

void StreamingSession::end_replay() {
  if (mode_ != Mode::replay) throw CoreError(Failure::usage, "a replay was ended that was not begun");
  if (graph_) throw CoreError(Failure::usage, "a replay was ended without its launch");
  replay_ends();
  run_.replays = 1;
  conclude();
}

void StreamingSession::abort() noexcept {
  // A run that was refused before it began has touched nothing. And a stream under capture must not be synchronized.
  if (mode_ == Mode::idle) return;
  if (mode_ == Mode::capture) {
    capture_failed();
    quietly([&] { driver_.destroy_graph(driver_.end_capture(compute_)); });
    leave_capture();
    return;
  }
  finish();
  if (mode_ == Mode::run) stalls_.discard_run();
  if (trace_) trace_->drop_open();
  reset();
  owner_ = -1;
  has_run_ = false;
  mode_ = Mode::idle;
}

void StreamingSession::require_idle() const {
  if (mode_ != Mode::idle) throw CoreError(Failure::usage, "the plan cannot be changed while a run has not ended");
}

void StreamingSession::finish() noexcept {
  // The caller's stream first: the copies that follow its kernels cannot end before it does.
  if (mode_ == Mode::run || mode_ == Mode::replay) sync_with_retry([&] { driver_.synchronize_stream(compute_); });
  // A run that failed at its start may have failed before it waited for the last one.
  if (has_run_) sync_with_retry([&] { driver_.synchronize_event(run_end_); });
  sync_with_retry([&] { driver_.synchronize_stream(copy_stream_); });
  source_.finish();
}

void StreamingSession::drain() {
  if (has_run_) driver_.synchronize_event(run_end_);
  driver_.synchronize_stream(copy_stream_);
}

void StreamingSession::wait_for_copy(Event ready) {
  stalls_.before(compute_);
  driver_.wait(compute_, ready);  // S2
  stalls_.after(compute_);
}

void StreamingSession::measure_link(const Copies& copies) {
  link_.clear();
  if (copies.empty()) return;
  std::vector<LinkRecord> link{time_copies(copies)};
  auto smaller = [](const auto& a, const auto& b) { return a.first.bytes < b.first.bytes; };
  const auto& [largest, address] = *std::max_element(copies.begin(), copies.end(), smaller);
  for (int64_t bytes : kMeasuredPieces) {
    Copies parts;
    for (int64_t at = 0; at + bytes <= largest.bytes && at < kMeasuredPartsBytes; at += bytes) {
      PieceRecord part = largest;
      part.weight_offset_bytes += at;
      part.range_offset_bytes += at;
      part.bytes = bytes;
      parts.emplace_back(part, address + (Address)at);
    }
    if (!parts.empty()) link.push_back(time_copies(parts));
  }
  link_ = std::move(link);
  if (!poison_) return;
  // These copies must not hide one that is missing later.
  for (const auto& [piece, to] : copies) driver_.fill(to, kPoison, (size_t)piece.bytes, copy_stream_);
  driver_.synchronize_stream(copy_stream_);
}

LinkRecord StreamingSession::time_copies(const Copies& copies) {
  LinkRecord record{(int64_t)copies.size(), 0, 0};
  std::vector<PieceRecord> pieces;
  for (const auto& copy : copies) {
    pieces.push_back(copy.first);
    record.bytes += source_.link_bytes(copy.first);
  }
  source_.follow({}, pieces);
  Event begin = driver_.create_event(true);
  Undo undo_begin([&] { driver_.destroy_event(begin); });
  Event end = driver_.create_event(true);
  Undo undo_end([&] { driver_.destroy_event(end); });
  // The first copy out of memory that was just registered is slower than any after it, so the second time counts.
  for (int time = 0; time < 2; ++time) {
    // No work from the first time is left that the second would find done.
    driver_.synchronize_stream(copy_stream_);
    driver_.record(begin, copy_stream_);
    for (const auto& [piece, address] : copies) source_.copy(piece, address, copy_stream_);
    driver_.record(end, copy_stream_);
  }
  driver_.synchronize_event(end);
  source_.follow({}, {});
  record.ns = driver_.elapsed_ns(begin, end);
  return record;
}

void StreamingSession::count(Counters* last_run, Counters* totals) {
  *last_run = run_;
  if (!run_.replays) last_run->stall_ns = stalls_.last_run_ns();
  *totals = totals_;
  totals->stall_ns = stalls_.total_ns();
  add_device_counts(last_run, totals);
}

void StreamingSession::start_trace() { trace_ = std::make_unique<Trace>(driver_, copy_stream_); }

std::vector<SpanRecord> StreamingSession::stop_trace() {
  if (!trace_) throw CoreError(Failure::usage, "no trace was started");
  std::unique_ptr<Trace> trace = std::move(trace_);
  return trace->collect();
}

}  // namespace penstock
