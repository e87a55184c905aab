// Streams are not alike: the GPU takes work from them by two front ends, and two streams of the same one take turns at
// half the speed (H200: 6.8 us for a kernel on each, 3.4 where they are of different ones; a stream keeps its own for
// life). Decoding and computing take turns hundreds of times in a run.
#pragma once

#include <vector>

#include "cuda/cuda_library.h"
#include "cuda/cuda_outcome.h"

namespace penstock {

// The index of the stream that takes turns fastest with the legacy default one, where torch computes unless told
// otherwise. The first, where that one cannot be used because another thread captures.
CudaOutcome choose_stream(const CudaLibrary& cuda, const std::vector<DeviceStream>& streams, size_t* out);

}  // namespace penstock
