// As much of libcuda.so.1 as the split linear calls, over the emulator: tensor maps are encoded as the emulator reads
// them, a launch runs the kernel's text. Signatures are the driver's own.
#include <cstdint>
#include <cstring>
#include <string>

#include "split_params.h"

extern "C" {

const char* emulate(const penstock::SplitParams* params, int clusters, int cluster_ctas, int shared_bytes,
                    int copies_land, unsigned long long seed, unsigned long long* host_bytes_read);
int emulated_threads();

// What the tests set and read.
struct Emulation {
  uint64_t host_begin, host_end;  // this range is registered host memory
  int capability_major;
  int most_clusters;
  int contexts;                   // pushed and not popped
  int launches;
  uint64_t stream;
  unsigned shared_limit, portable_only;
  uint64_t host_bytes_read;
  int shared_bytes;               // that a block has
} emulation = {0, 0, 9, 3, 0, 0, 0, 0, 1, 0, 232448};

static std::string failure;

typedef int Result;
struct LaunchAttribute {
  int id;
  char pad[4];
  union {
    char bytes[64];
    struct {
      unsigned x, y, z;
    } cluster;
  };
};
struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  void* stream;
  LaunchAttribute* attributes;
  unsigned count;
};

Result cuInit(unsigned flags) { return flags ? 1 : 0; }
Result cuDeviceGet(int* device, int ordinal) { return *device = 40 + ordinal, 0; }
Result cuDeviceGetAttribute(int* value, int attribute, int device) {
  if (device != 40) return 101;
  *value = attribute == 75   ? emulation.capability_major
           : attribute == 97 ? emulation.shared_bytes
                             : 0;
  return 0;
}
Result cuDevicePrimaryCtxRetain(void** context, int device) { return *context = (void*)0x7f0000000001, device != 40; }
Result cuCtxPushCurrent_v2(void* context) { return context == (void*)0x7f0000000001 ? ++emulation.contexts, 0 : 201; }
Result cuCtxPopCurrent_v2(void** context) { return *context = nullptr, --emulation.contexts, 0; }
Result cuModuleLoadData(void** module, const void* image) {
  *module = (void*)0x7f0000000002;
  return emulation.contexts && std::strcmp((const char*)image, "a cubin") == 0 ? 0 : 200;
}
Result cuModuleUnload(void* module) { return module == (void*)0x7f0000000002 ? 0 : 1; }
Result cuModuleGetFunction(void** function, void* module, const char* name) {
  if (module != (void*)0x7f0000000002) return 1;
  *function = (void*)0x7f0000000010;
  return std::strcmp(name, "split_linear") ? 500 : 0;
}
Result cuFuncSetAttribute(void* function, int attribute, int value) {
  if ((uint64_t)function >> 4 != 0x7f000000001) return 1;
  if (attribute == 8) emulation.shared_limit = (unsigned)value;
  else if (attribute == 14) emulation.portable_only = 0;
  else return 1;
  return 0;
}
Result cuOccupancyMaxActiveClusters(int* count, void* function, const LaunchConfig* config) {
  *count = emulation.most_clusters;
  return (uint64_t)function >> 4 == 0x7f000000001 && config->count == 1 && config->attributes[0].id == 4 ? 0 : 1;
}
Result cuPointerGetAttribute(void* data, int attribute, unsigned long long pointer) {
  *(uint64_t*)data = pointer;
  return attribute == 3 ? 0 : 1;
}
Result cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* address, const uint64_t* sizes,
                              const uint64_t* strides, const unsigned* box, const unsigned* steps, int interleave,
                              int swizzle, int promotion, int fill) {
  const bool aligned = (uint64_t)map % 128 == 0 && (uint64_t)address % 16 == 0 && strides[0] % 16 == 0;
  const bool on_host = (uint64_t)address >= emulation.host_begin && (uint64_t)address < emulation.host_end;
  if (!aligned || type != 9 || rank != 2 || box[0] != 64 || box[1] > 256 || steps[0] != 1 || steps[1] != 1) return 1;
  if (interleave || swizzle != 3 || fill || promotion != (on_host ? 0 : 3) || !sizes[0] || !sizes[1]) return 1;
  const uint64_t words[16] = {(uint64_t)address, sizes[0], sizes[1], strides[0], box[1], on_host};
  std::memcpy(map, words, sizeof(words));
  return 0;
}
Result cuLaunchKernelEx(const LaunchConfig* config, void* function, void** params, void** extra) {
  if (!emulation.contexts || extra || config->count != 1 || config->attributes[0].id != 4) return 1;
  const unsigned cluster = config->attributes[0].cluster.x;
  if (cluster == 0 || config->grid_x % cluster || config->attributes[0].cluster.y != 1) return 1;
  if (function != (void*)0x7f0000000010 || config->shared_bytes > emulation.shared_limit) return 1;
  if ((int)config->block_x != emulated_threads()) return 1;
  if (cluster > 8 && emulation.portable_only) return 1;
  ++emulation.launches;
  emulation.stream = (uint64_t)config->stream;
  unsigned long long read = 0;
  failure = emulate((const penstock::SplitParams*)params[0], (int)(config->grid_x / cluster), (int)cluster,
                    (int)config->shared_bytes, 0, 1, &read);
  emulation.host_bytes_read += read;
  return failure.empty() ? 0 : 719;
}
Result cuGetErrorString(int code, const char** text) {
  *text = code == 719 ? failure.c_str() : "invalid";
  return 0;
}
}
