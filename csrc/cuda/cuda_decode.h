// The decoding kernels on one CUDA device.
#pragma once

#include "cuda/cuda_library.h"
#include "cuda/cuda_outcome.h"
#include "packed/decode_call.h"

namespace penstock {

class CudaDecoder {
 public:
  explicit CudaDecoder(const CudaLibrary& cuda) : cuda_(cuda) {}

  // The context must be current, as for every call. Loading once is enough.
  CudaOutcome load(int device);
  void unload() noexcept;
  CudaOutcome launch(const DecodeCall& call, DeviceStream stream) const;

 private:
  const CudaLibrary& cuda_;
  void* module_ = nullptr;
  void* functions_[kPackedKinds] = {};
  int multiprocessors_ = 0;
};

}  // namespace penstock
