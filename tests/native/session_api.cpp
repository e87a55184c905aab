// Sessions over sources that tests choose: penstock_open decides on chunks and buffers by itself.
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

}  // extern "C"
