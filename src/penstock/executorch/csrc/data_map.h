// The weights as ExecuTorch hands them out, checked against the program and traced back to their file.
#pragma once

#include <executorch/runtime/core/named_data_map.h>

#include <string>
#include <vector>

#include "program_session.h"

namespace penstock_executorch {

// Throws LoadError(missing_weight), LoadError(weight_mismatch) or LoadError(weights_file).
WeightsPlace locate_weights(const executorch::runtime::NamedDataMap& data, const Payload& payload);

}  // namespace penstock_executorch
