// Sessions over sources that tests choose: penstock_open decides on chunks and buffers by itself. And what only compiled
// code does with a session, and its streams.
#include <new>
#include <stdexcept>

#include "driver/cleanup.h"
#include "session/engine.h"
#include "status.h"

extern "C" {

// `extents`, `packed`: as penstock_open has them. `lru`: the policy. `staging_buffers` 0: the file is registered in chunks
// that end at `chunk_ends`.
int32_t penstock_test_session_create(penstock::Driver* driver, const char* path, const int64_t* extents,
                                     int64_t extent_count, int32_t lru, const int64_t* chunk_ends, int64_t chunk_count,
                                     int64_t staging_buffer_bytes, int32_t staging_buffers, int32_t staging_threads,
                                     int32_t device_index, int32_t poison, const int64_t* packed, int64_t packed_count,
                                     void** out) {
  return penstock::to_status([&] {
    penstock::Entered entered(*driver);
    auto made = std::make_unique<penstock::Engine>();
    made->driver = driver;
    made->map(path, extents, extent_count);
    if (staging_buffers > 0)
      made->stage({staging_buffer_bytes, staging_buffers, staging_threads});
    else
      made->register_chunks({chunk_ends, chunk_ends + chunk_count});
    made->begin({packed, packed + packed_count}, lru != 0, device_index, poison != 0);
    *out = made.release();
  });
}

static penstock::Engine* engine(void* handle) { return static_cast<penstock::Engine*>(handle); }

// Gives the plan up, and puts none in its place.
int32_t penstock_test_session_uninstall(void* handle) {
  return penstock::to_status([&] {
    penstock::Entered entered(*engine(handle)->driver);
    engine(handle)->session().require_idle();
    if (engine(handle)->planned) engine(handle)->planned->uninstall();
    else engine(handle)->lru->uninstall();
  });
}

namespace {

// Multiplies with something that is thrown.
struct FailingSession final : penstock::Session {
  bool is_out_of_memory;
  explicit FailingSession(bool is_out_of_memory) : is_out_of_memory(is_out_of_memory) {}
  bool fetch(const penstock::FetchRequest&, penstock::TensorHandle*) override { return false; }
  void done(int64_t) override {}
  void multiply(const penstock::LinearRequest&, penstock::TensorHandle*) override {
    if (is_out_of_memory) throw std::bad_alloc();
    throw std::length_error("too long");
  }
};

}  // namespace

// What a session tells of it, whose caller is generated code.
int32_t penstock_test_failing_linear(int32_t is_out_of_memory) {
  return penstock::to_status([&] {
    FailingSession session(is_out_of_memory != 0);
    if (!session.linear({}, nullptr)) throw penstock::CoreError(session.failure(), session.error());
  });
}

// What compiled code does, without torch.
int32_t penstock_test_session_acquire(void* handle, int64_t number, uint64_t* address) {
  return engine(handle)->session().acquire(number, address) ? 0 : 1;
}
void penstock_test_session_done(void* handle, int64_t step) { engine(handle)->session().done(step); }

// Takes rows of an access that was fetched, by `rows` numbers of 64 bits.
int32_t penstock_test_session_take_rows(void* handle, int64_t number, uint64_t index, int64_t rows, uint64_t out) {
  return engine(handle)->planned->take_rows(number, index, rows, out) ? 0 : 1;
}

void* penstock_test_session_copy_stream(void* handle) { return engine(handle)->session().copy_stream(); }
// Null: packed weights alone have a stream of their own on the link.
void* penstock_test_session_link_stream(void* handle) { return engine(handle)->source->link_stream(); }

}  // extern "C"
