// Loads and launches the PTX of the decoding kernels, and decides how wide a launch is.
#include "cuda/cuda_decode.h"

#include <algorithm>

#include "packed/decode_params.h"

namespace penstock {
namespace {

constexpr char kPtx[] =
#include "packed/decode_ptx.inc"
    ;

// By kind. Kinds count from 1.
constexpr const char* kFunctions[kPackedKinds] = {"penstock_decode_bfloat16", "penstock_decode_float32",
                                                  "penstock_decode_float16", "penstock_decode_float8_e4m3",
                                                  "penstock_decode_float8_e5m2",
                                                  "penstock_decode_bfloat16_levels"};
constexpr int kMultiprocessorCount = 16;
constexpr unsigned kThreads = 256;
constexpr unsigned kTilesABlock = kThreads / 32;
// In thread blocks per multiprocessor. Measured on an H200: docs/performance.md.
constexpr int kWide = 4;
constexpr int kNarrow = 1;

}  // namespace

CudaOutcome CudaDecoder::load(int device) {
  if (module_) return {0, ""};
  if (int code = cuda_.device_attribute(&multiprocessors_, kMultiprocessorCount, device))
    return {code, "cuDeviceGetAttribute"};
  if (int code = cuda_.module_load(&module_, kPtx)) {
    module_ = nullptr;
    return {code, "cuModuleLoadData"};
  }
  int code = 0;
  for (int kind = 0; kind < kPackedKinds && !code; ++kind)
    code = cuda_.module_function(&functions_[kind], module_, kFunctions[kind]);
  if (code) unload();
  return {code, "cuModuleGetFunction"};
}

void CudaDecoder::unload() noexcept {
  if (module_) cuda_.module_unload(module_);
  module_ = nullptr;
}

CudaOutcome CudaDecoder::launch(const DecodeCall& call, DeviceStream stream) const {
  const int64_t item = item_bytes(call.kind);
  DecodeParams params;
  params.packed = reinterpret_cast<const unsigned char*>(call.packed);
  params.out = reinterpret_cast<unsigned char*>(call.out - (Address)call.begin_bytes);
  params.begin_value = (unsigned)(call.begin_bytes / item);
  params.end_value = (unsigned)(call.end_bytes / item);
  params.first_tile = params.begin_value / kTileValues;
  params.end_tile = (params.end_value + kTileValues - 1) / kTileValues;
  // Nothing beyond the last block given is read, so the number of blocks bounds this, however large the weight is.
  const int64_t most_bytes = (int64_t)call.begins_bytes.size() * kBlockRawBytes;
  params.total_tiles = (unsigned)((std::min(call.weight_bytes, most_bytes) / item + kTileValues - 1) / kTileValues);
  for (size_t i = 0; i < call.begins_bytes.size(); ++i)
    params.begins[i] = (unsigned)(call.begins_bytes[i] / kPackedUnitBytes);
  const unsigned tiles = params.end_tile - params.first_tile;
  const unsigned most = (unsigned)(multiprocessors_ * (call.wide ? kWide : kNarrow));
  CudaLaunchConfig config{};
  config.grid[0] = std::min(most, (tiles + kTilesABlock - 1) / kTilesABlock);
  config.block[0] = kThreads;
  config.grid[1] = config.grid[2] = config.block[1] = config.block[2] = 1;
  config.stream = stream;
  // The driver copies the parameters before it returns.
  void* arguments[] = {&params};
  void* function = functions_[(int)call.kind - 1];
  return {cuda_.launch_kernel(&config, function, arguments, nullptr), "cuLaunchKernelEx"};
}

}  // namespace penstock
