// Gives every refusal a number of ExecuTorch's.
#include "error_code.h"

namespace penstock_executorch {

using executorch::runtime::Error;

Error code_of(const LastRefusal& refusal) {
  const Failure failure = refusal.kind == Kind::core ? (Failure)refusal.detail : Failure::none;
  if (failure == Failure::device_memory || failure == Failure::host_memory) return Error::MemoryAllocationFailed;
  switch (refusal.kind) {
    case Kind::activations:
      return Error::MemoryAllocationFailed;
    case Kind::package:
      return Error::InvalidProgram;
    case Kind::budget:
    case Kind::below_floor:
    case Kind::option:
    case Kind::input:
    case Kind::device:
      return Error::InvalidArgument;
    case Kind::missing_weight:
    case Kind::weight_mismatch:
    case Kind::weights_file:
      return Error::InvalidExternalData;
    case Kind::build:
      return Error::DelegateInvalidCompatibility;
    case Kind::host:
      return Error::AccessFailed;
    case Kind::state:
    case Kind::busy:
      return Error::InvalidState;
    default:
      return Error::Internal;
  }
}

}  // namespace penstock_executorch
