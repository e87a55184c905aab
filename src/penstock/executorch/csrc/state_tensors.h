// For the sources that include torch's headers.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace penstock_executorch {

struct StateTensors {
  at::Device device{at::kCPU};
  std::vector<at::Tensor> each;
};

}  // namespace penstock_executorch
