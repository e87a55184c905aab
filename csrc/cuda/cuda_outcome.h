// What a few calls of libcuda.so.1 came to; cuda_driver.cpp makes a DriverError of it.
#pragma once

namespace penstock {

// The call that failed, by its name, and what it said; code 0 if none did.
struct CudaOutcome {
  int code;
  const char* call;
};

}  // namespace penstock
