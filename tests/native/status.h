// How a C function tells of a failure: by the number of its Failure, 0 on success; penstock_test_error tells more.
#pragma once

#include <exception>
#include <string>

#include "driver/driver.h"

namespace penstock {

// Of the calling thread's last failure.
inline thread_local std::string test_error;

template <typename Body>
int32_t to_status(Body body) {
  try {
    body();
    return (int32_t)Failure::none;
  } catch (const CoreError& error) {
    test_error = error.what();
    return (int32_t)error.failure;
  } catch (const std::exception& error) {
    test_error = error.what();
    return (int32_t)Failure::usage;  // as the core itself tells of it
  }
}

}  // namespace penstock
