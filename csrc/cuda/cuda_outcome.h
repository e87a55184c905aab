// The outcome of a few calls of libcuda.so.1. cuda_driver.cpp makes a DriverError of a failure.
#pragma once

namespace penstock {

// The name of the call that failed, and its code. The code is 0 if none failed.
struct CudaOutcome {
  int code;
  const char* call;
};

}  // namespace penstock
