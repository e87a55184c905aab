// The C interface that makes a soft driver. Everything else goes through the table of any driver.
#include <exception>
#include <string>

#include "soft/soft_driver.h"

namespace {
thread_local std::string soft_error;
}  // namespace

extern "C" {

// Why the calling thread's last attempt failed.
const char* penstock_soft_error() { return soft_error.c_str(); }

// Null on failure.
void* penstock_soft_create(size_t page_bytes, size_t capacity_bytes, int32_t poison) {
  try {
    return static_cast<penstock::Driver*>(new penstock::SoftDriver(page_bytes, capacity_bytes, poison != 0));
  } catch (const std::exception& error) {
    soft_error = error.what();
    return nullptr;
  }
}

}  // extern "C"
