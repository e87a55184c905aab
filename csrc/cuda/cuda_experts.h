// The kernels that keep experts in slots, on one CUDA device.
#pragma once

#include "cuda/cuda_library.h"
#include "cuda/cuda_outcome.h"
#include "experts/expert_table.h"

namespace penstock {

class CudaExperts {
 public:
  explicit CudaExperts(const CudaLibrary& cuda) : cuda_(cuda) {}

  // The context must be current, as for every call. Loading once is enough.
  CudaOutcome load(int device);
  void unload() noexcept;
  CudaOutcome choose(const ChooseCall& call, DeviceStream stream) const;
  CudaOutcome move(const MoveCall& call, DeviceStream stream) const;
  CudaOutcome shift(const ShiftCall& call, DeviceStream stream) const;

 private:
  CudaOutcome launch(void* function, const void* call, unsigned blocks, unsigned threads, DeviceStream stream) const;

  const CudaLibrary& cuda_;
  void* module_ = nullptr;
  void* choose_ = nullptr;
  void* move_rows_ = nullptr;
  void* move_groups_ = nullptr;
  void* shift_rows_ = nullptr;
  unsigned blocks_ = 0;
};

}  // namespace penstock
