// The core's C interface: drivers, the weights file, sessions. Python and the ExecuTorch delegate use it.
// Functions that can fail return null or nonzero; penstock_failure and penstock_failure_text then say why, per thread.
#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <thread>

#include "abi/torch_abi.h"
#include "cuda/cuda_driver.h"
#include "driver/cleanup.h"
#include "open/amounts.h"
#include "open/budget_choice.h"
#include "open/build_check.h"
#include "open/byte_text.h"
#include "open/chunks.h"
#include "open/host_limit.h"
#include "open/registration_probe.h"
#include "penstock_core.h"
#include "session/engine.h"
#include "session/session_summary.h"

namespace penstock {
namespace {

thread_local Failure last_failure = Failure::none;
thread_local std::string last_text;
thread_local std::string limit_text;

template <typename Action>
int32_t guarded(Action&& action) noexcept {
  last_failure = Failure::none;
  last_text.clear();
  try {
    action();
    return 0;
  } catch (const CoreError& error) {
    last_failure = error.failure;
    last_text = error.what();
  } catch (const std::bad_alloc&) {
    last_failure = Failure::usage;
    last_text = "the host has no memory left";
  } catch (const std::exception& error) {
    last_failure = Failure::usage;
    last_text = error.what();
  }
  return 1;
}

// In slices, with a report to the caller after each.
void bring_in(const HostFile& file, int32_t (*on_bytes)(int64_t)) {
  constexpr size_t kSliceBytes = size_t{256} << 20;
  const int threads = (int)std::min(16u, std::max(1u, std::thread::hardware_concurrency()));
  for (size_t offset = 0; offset < file.bytes(); offset += kSliceBytes) {
    std::atomic<int64_t> done{0};
    file.prefault(offset, std::min(kSliceBytes, file.bytes() - offset), threads, done);
    if (on_bytes && on_bytes(done)) throw CoreError(Failure::usage, "given up while " + file.path() + " was read");
  }
}

// Begins a probe if the caller has not.
void require_registration(const Driver& over, const PenstockOpenRequest& asked) {
  if (over.probed_device() < 0) return;
  std::optional<RegistrationProbe> begun;
  RegistrationProbe* probe = static_cast<RegistrationProbe*>(asked.probe);
  if (!probe) probe = &begun.emplace(asked.path, over.probed_device());
  probe->require(asked.on_bytes);
}

Engine* engine(void* handle) { return static_cast<Engine*>(handle); }
Driver* driver(void* handle) { return static_cast<Driver*>(handle); }

// The driver's device stays current until the run has ended.
template <typename Begin>
int32_t begun(void* handle, Begin&& begin) noexcept {
  return guarded([&] {
    Engine& over = *engine(handle);
    over.driver->enter();
    Undo leave([&] { over.driver->leave(); });
    begin(over);
    over.run_thread = std::this_thread::get_id();
    leave.keep();
  });
}

void aborted(Engine& over) noexcept {
  // Only a run that is under way has made the device current.
  bool inside = over.run_thread != std::thread::id();
  over.run_thread = {};
  set_current_session(nullptr);
  over.session().abort();
  if (inside) over.driver->leave();
}

template <typename End>
int32_t ended(void* handle, End&& end) noexcept {
  return guarded([&] {
    Engine& over = *engine(handle);
    set_current_session(nullptr);
    over.run_thread = {};
    Undo leave([&] { over.driver->leave(); });
    Undo abandon([&] { over.session().abort(); });
    end(over);
    abandon.keep();
  });
}

// Copies at most `capacity` records to `out`; returns how many there are.
template <typename Record>
int64_t copy_records(const std::vector<Record>& records, int64_t* out, int64_t capacity) {
  static_assert(sizeof(Record) % sizeof(int64_t) == 0);
  int64_t count = (int64_t)records.size();
  if (capacity > 0 && count > 0) std::memcpy(out, records.data(), (size_t)std::min(count, capacity) * sizeof(Record));
  return count;
}

}  // namespace
}  // namespace penstock

using namespace penstock;

extern "C" {

int32_t penstock_failure() { return (int32_t)last_failure; }
const char* penstock_failure_text() { return last_text.c_str(); }

void* penstock_cuda_create(int32_t ordinal) {
  void* out = nullptr;
  guarded([&] { out = static_cast<Driver*>(new CudaDriver(ordinal)); });
  return out;
}

void penstock_driver_destroy(void* handle) { delete driver(handle); }

int32_t penstock_driver_granularity(void* handle, int64_t* bytes) {
  return guarded([&] { *bytes = (int64_t)driver(handle)->granularity_bytes(); });
}

int32_t penstock_driver_pool_unit(void* handle, int64_t* bytes) {
  return guarded([&] {
    Entered entered(*driver(handle));
    *bytes = (int64_t)driver(handle)->pool_unit_bytes();
  });
}

int32_t penstock_driver_memory(void* handle, int64_t* free_bytes, int64_t* total_bytes) {
  return guarded([&] {
    Entered entered(*driver(handle));
    MemoryInfo info = driver(handle)->memory_info();
    *free_bytes = (int64_t)info.free_bytes;
    *total_bytes = (int64_t)info.total_bytes;
  });
}

// Makes all decisions about host memory, and refuses before anything is pinned.
void* penstock_open(void* driver_handle, const PenstockOpenRequest* asked) {
  void* out = nullptr;
  guarded([&] {
    Entered entered(*driver(driver_handle));
    auto made = std::make_unique<Engine>();
    made->driver = driver(driver_handle);
    const std::string path = asked->path;
    if (asked->host_cap_bytes >= 0) {
      const StagingSizes sizes = staging_sizes(asked->host_cap_bytes, std::thread::hardware_concurrency());
      made->host_bytes = sizes.buffers * sizes.buffer_bytes;
      made->share = std::make_unique<HostShare>(sum_of(made->host_bytes, asked->extra_host_bytes), "the staging buffers",
                                                asked->root);
      made->map(path, asked->extents, asked->extent_count);
      made->stage(sizes);
    } else {
      made->share = HostShare::of_file(path, asked->extra_host_bytes, asked->root);
      require_registration(*made->driver, *asked);
      made->map(path, asked->extents, asked->extent_count);
      made->host_bytes = (int64_t)made->file->bytes();
      bring_in(*made->file, asked->on_bytes);
      made->share->file_has_come();
      made->register_chunks(
          chunk_ends(made->places.all(), made->host_bytes, kRegistrationLimitBytes, (int64_t)host_page_bytes()));
    }
    made->begin({asked->packed, asked->packed + asked->packed_count}, asked->lru != 0, asked->device_index,
                asked->poison != 0);
    out = made.release();
  });
  return out;
}

int32_t penstock_check_build(const PenstockBuild* built, const PenstockBuild* here) {
  return guarded([&] { check_build(*built, *here); });
}

// Tries in a separate process whether the file can be registered with a GPU. Begun before planning, it costs no time.
void* penstock_probe_begin(const char* path, int32_t device_index) {
  void* out = nullptr;
  guarded([&] { out = new RegistrationProbe(path, device_index); });
  return out;
}
// Waits for the answer; `on_wait` is called as PenstockOpenRequest::on_bytes is, with no bytes.
int32_t penstock_probe_require(void* probe, int32_t (*on_wait)(int64_t)) {
  return guarded([&] { static_cast<RegistrationProbe*>(probe)->require(on_wait); });
}
void penstock_probe_destroy(void* probe) { delete static_cast<RegistrationProbe*>(probe); }

// How much more host memory can be pinned; penstock_host_limit_text says what sets the limit.
int32_t penstock_host_limit(const char* root, int64_t pinned, int64_t* available_bytes) {
  return guarded([&] {
    const HostLimit found = host_limit(root, pinned);
    *available_bytes = found.available_bytes;
    limit_text = found.source;
  });
}
const char* penstock_host_limit_text() { return limit_text.c_str(); }
int64_t penstock_pinned_bytes() { return pinned_bytes(); }

int64_t penstock_budget_origin(int64_t given_bytes, int64_t origin, int64_t baked_bytes) {
  return budget_origin(given_bytes, origin, baked_bytes);
}
// Good until the next call on this thread.
const char* penstock_format_bytes(int64_t bytes) {
  thread_local std::string text;
  text = format_bytes(bytes);
  return text.c_str();
}
// The number of bytes that a text stands for, as penstock.budget reads it.
int32_t penstock_parse_bytes(const char* text, int64_t* bytes) {
  return guarded([&] { *bytes = parse_bytes(text); });
}
int64_t penstock_reserve_bytes(int64_t total_bytes, int32_t on_gpu) { return reserve_bytes(total_bytes, on_gpu != 0); }
int32_t penstock_choose_budget(PenstockBudget* budget) {
  return guarded([&] { choose_budget(*budget); });
}
// What to tell the user when less is taken than was asked for, else empty. Good until the next call.
const char* penstock_clamp_sentence(const PenstockBudget* budget) {
  thread_local std::string text;
  text = clamp_sentence(*budget);
  return text.c_str();
}

// Host bytes that the session holds, of the file or of staging buffers. 0 if it was not opened here.
int64_t penstock_session_host_bytes(void* handle) { return engine(handle)->host_bytes; }

void penstock_session_destroy(void* handle) {
  Engine* over = engine(handle);
  // Nobody ended the run: the thread that began it must not find a session that is gone.
  if (over->run_thread == std::this_thread::get_id()) aborted(*over);
  // A lost context refuses even this; everything is given back all the same.
  bool inside = true;
  try {
    over->driver->enter();
  } catch (const CoreError&) {
    inside = false;
  }
  Driver* held = over->driver;
  delete over;
  if (inside) held->leave();
}

// Memory pinned for the session's device, for what the caller moves there. Null if there is none; must be freed before
// the session.
void* penstock_session_allocate_host(void* handle, int64_t bytes) {
  void* out = nullptr;
  guarded([&] {
    Entered entered(*engine(handle)->driver);
    out = engine(handle)->driver->allocate_host((size_t)bytes);
  });
  return out;
}
void penstock_session_free_host(void* handle, void* start) {
  quietly([&] {
    Entered entered(*engine(handle)->driver);
    engine(handle)->driver->free_host(start);
  });
}

int32_t penstock_session_install(void* handle, const int64_t* numbers, int64_t count) {
  return guarded([&] {
    Engine& over = *engine(handle);
    Entered entered(*over.driver);
    over.session().require_idle();
    if (over.planned) over.planned->install(read_plan(numbers, (size_t)count, over.weight_bytes));
    else over.lru->install(read_lru(numbers, (size_t)count, over.weight_bytes));
    if (over.share) over.share->rest_is_allocated();
  });
}

// Installs a plan that was made for unpacked weights when some are packed: these pass through `slots` slots, in
// `total_bytes` of memory on top of the plan's.
int32_t penstock_session_install_with_slots(void* handle, const int64_t* numbers, int64_t count, int64_t slots,
                                            int64_t slot_bytes, int64_t total_bytes) {
  return guarded([&] {
    Engine& over = *engine(handle);
    Entered entered(*over.driver);
    over.session().require_idle();
    if (!over.planned) throw CoreError(Failure::usage, "slots were given to the policy lru, which decodes nothing");
    PlanRecord plan = read_plan(numbers, (size_t)count, over.weight_bytes);
    add_slots(plan, slots, slot_bytes, total_bytes);
    over.planned->install(std::move(plan));
    if (over.share) over.share->rest_is_allocated();
  });
}

// Between runs, for programs on a GPU: sets what prepares the kernel that reads a weight in two places.
int32_t penstock_session_offer_linear(void* handle, PrepareLinear prepare) {
  return guarded([&] {
    Engine& over = *engine(handle);
    if (!over.planned)
      throw CoreError(Failure::usage, "a linear of weights in two places was offered to the policy lru, which keeps "
                                      "every weight in one");
    over.planned->offer_linear(prepare);
  });
}

// Between begin and end (or abort) the calling thread is in the session, and its device is current.
int32_t penstock_session_begin(void* handle, int64_t method, void* stream) {
  return begun(handle, [=](Engine& over) {
    over.file->check_unchanged();
    over.session().begin(method, stream);
    set_current_session(&over.session());
  });
}

int32_t penstock_session_end(void* handle) {
  return ended(handle, [](Engine& over) { over.session().end(); });
}

void penstock_session_abort(void* handle) { aborted(*engine(handle)); }

// Around compiled code, on a stream that is captured meanwhile; abort gives it up.
int32_t penstock_session_begin_capture(void* handle, int64_t method, void* stream) {
  return begun(handle, [=](Engine& over) {
    over.session().begin_capture(method, stream);
    set_current_session(&over.session());
  });
}

int32_t penstock_session_end_capture(void* handle, int64_t* capture) {
  return ended(handle, [=](Engine& over) { *capture = over.session().end_capture(); });
}

int32_t penstock_session_drop_capture(void* handle, int64_t capture) {
  return guarded([&] {
    Entered entered(*engine(handle)->driver);
    engine(handle)->session().drop_capture(capture);
  });
}

// Begin, launch, end; abort gives it up.
int32_t penstock_session_begin_replay(void* handle, int64_t capture, void* stream) {
  return begun(handle, [=](Engine& over) {
    over.file->check_unchanged();
    over.session().begin_replay(capture, stream);
  });
}

int32_t penstock_session_launch(void* handle) {
  return guarded([&] { engine(handle)->session().launch(); });
}

int32_t penstock_session_end_replay(void* handle) {
  return ended(handle, [](Engine& over) { over.session().end_replay(); });
}

// The first failure of the run, which generated code may have reduced to a generic one.
int32_t penstock_session_failure(void* handle) { return (int32_t)engine(handle)->session().failure(); }
const char* penstock_session_failure_text(void* handle) { return engine(handle)->session().error().c_str(); }

int32_t penstock_session_counters(void* handle, PenstockCounters* last_run, PenstockCounters* totals) {
  return guarded([&] {
    Entered entered(*engine(handle)->driver);
    engine(handle)->session().count(last_run, totals);
  });
}

// Bank after bank: calls, hits and misses of experts since the plan was installed, three numbers each. Called first for
// the count alone. Waits for the device.
int64_t penstock_session_expert_counts(void* handle, int64_t* out, int64_t capacity) {
  int64_t count = -1;
  guarded([&] {
    Engine& over = *engine(handle);
    Entered entered(*over.driver);
    count = over.planned ? copy_records(over.planned->expert_counts(), out, capacity) : 0;
  });
  return count;
}

// For each number of slots: how many of a bank's logged uses would have been hits, how many uses there were, and in how
// many calls.
int32_t penstock_session_expert_hits(void* handle, int64_t bank, const int64_t* slots, int64_t count, int64_t* out) {
  return guarded([&] {
    Engine& over = *engine(handle);
    Entered entered(*over.driver);
    if (!over.planned) throw CoreError(Failure::usage, "the policy lru has no banks of experts");
    copy_records(over.planned->logged_hits(bank, {slots, slots + count}), out, count);
  });
}

int32_t penstock_session_memory(void* handle, int64_t* device_bytes, int64_t* peak_device_bytes) {
  return guarded([&] {
    Entered entered(*engine(handle)->driver);
    Engine& over = *engine(handle);
    *device_bytes = over.planned ? over.planned->device_bytes() : over.lru->device_bytes();
    *peak_device_bytes = over.planned ? over.planned->peak_device_bytes() : over.lru->peak_device_bytes();
  });
}

// How long copies took when the session was set up, three numbers a record. Called first for the count alone.
int64_t penstock_session_link(void* handle, int64_t* out, int64_t capacity) {
  return copy_records(engine(handle)->session().link(), out, capacity);
}

// In one line. Good until the next call on this thread; null on failure.
const char* penstock_session_summary(void* handle, const PenstockSummary* asked) {
  thread_local std::string text;
  return guarded([&] { text = session_summary(*engine(handle), *asked); }) ? nullptr : text.c_str();
}

int32_t penstock_session_drain(void* handle) {
  return guarded([&] {
    Entered entered(*engine(handle)->driver);
    engine(handle)->session().drain();
  });
}

int32_t penstock_session_start_trace(void* handle) {
  return guarded([&] {
    Entered entered(*engine(handle)->driver);
    engine(handle)->session().start_trace();
  });
}

int32_t penstock_session_stop_trace(void* handle) {
  return guarded([&] {
    Entered entered(*engine(handle)->driver);
    engine(handle)->spans = engine(handle)->session().stop_trace();
  });
}

// Spans of the trace that was stopped last, seven numbers each. Called first for the count alone.
int64_t penstock_session_spans(void* handle, int64_t* out, int64_t capacity) {
  return copy_records(engine(handle)->spans, out, capacity);
}

int32_t penstock_load_torch() {
  return guarded([&] {
    std::string missing = load_torch_abi();
    if (!missing.empty()) throw CoreError(Failure::torch, missing);
  });
}

}  // extern "C"
