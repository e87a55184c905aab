// Implements each function of the driver table by calls of libcuda.so.1, and turns their results into a Failure.
#include "cuda/cuda_driver.h"

#include <algorithm>
#include <cmath>

#include "cuda/cuda_linear.h"
#include "driver/cleanup.h"

namespace penstock {
namespace {

constexpr int kSuccess = 0;
constexpr int kOutOfMemory = 2;
constexpr int kNotReady = 600;
constexpr int kCaptureImplicit = 906;
constexpr int kPinned = 1;
constexpr int kOnDevice = 1;
constexpr int kReadWrite = 3;
constexpr unsigned kNonBlocking = 1;
constexpr unsigned kDisableTiming = 2;
constexpr unsigned kEventExternal = 1;
constexpr int kCaptureThreadLocal = 1;
constexpr unsigned kRegisterPortable = 0x01;
constexpr unsigned kRegisterReadOnly = 0x08;

// After these the context is lost: every later call fails with the same code.
bool is_sticky(int code) {
  switch (code) {
    case 4:    // deinitialized
    case 201:  // invalid context
    case 214:  // uncorrectable ECC error
    case 220:  // uncorrectable NVLink error
    case 226:  // contained
    case 700:  // illegal address
    case 702:  // launch timeout
    case 709:  // context destroyed
    case 710:  // device assertion
    case 714:  // hardware stack error
    case 715:  // illegal instruction
    case 716:  // misaligned address
    case 717:  // invalid address space
    case 718:  // invalid program counter
    case 719:  // launch failed
      return true;
    default:
      return false;
  }
}

// `failure`: what it means if this very call fails.
void check(int code, const char* call, Failure failure = Failure::driver) {
  if (code == kSuccess) return;
  if (is_sticky(code)) failure = Failure::sticky;
  else if (failure == Failure::driver && code == kOutOfMemory) failure = Failure::device_memory;
  throw DriverError(failure, call, code, cuda_error_text(code));
}

}  // namespace

CudaDriver::CudaDriver(int ordinal) : cuda_(cuda_library()), ordinal_(ordinal), decoder_(cuda_), experts_(cuda_) {
  if (std::string missing = load_cuda_library(); !missing.empty())
    throw CoreError(Failure::driver, missing);
  check(cuda_.init(0), "cuInit");
  check(cuda_.device_get(&device_, ordinal), "cuDeviceGet");
  check(cuda_.primary_context_retain(&context_, device_), "cuDevicePrimaryCtxRetain");
  CudaAllocationProperties wanted = properties();
  int code = cuda_.granularity(&granularity_bytes_, &wanted, 0);
  if (code != kSuccess) {
    cuda_.primary_context_release(device_);
    check(code, "cuMemGetAllocationGranularity");
  }
}

CudaDriver::~CudaDriver() {
  // A lost context refuses this; the kernels are gone with it.
  if (cuda_.context_push(context_) == kSuccess) {
    decoder_.unload();
    experts_.unload();
    leave();
  }
  cuda_.primary_context_release(device_);
}

CudaAllocationProperties CudaDriver::properties() const {
  CudaAllocationProperties wanted{};
  wanted.type = kPinned;
  wanted.location = {kOnDevice, device_};
  return wanted;
}

void CudaDriver::enter() { check(cuda_.context_push(context_), "cuCtxPushCurrent"); }

void CudaDriver::leave() noexcept {
  void* popped = nullptr;
  cuda_.context_pop(&popped);
}

MemoryInfo CudaDriver::memory_info() {
  MemoryInfo info{};
  check(cuda_.memory_info(&info.free_bytes, &info.total_bytes), "cuMemGetInfo");
  return info;
}

Block CudaDriver::create_block(size_t bytes) {
  CudaAllocationProperties wanted = properties();
  unsigned long long handle = 0;
  check(cuda_.create(&handle, bytes, &wanted, 0), "cuMemCreate", Failure::device_memory);
  return handle;
}

void CudaDriver::release_block(Block block) { check(cuda_.release(block), "cuMemRelease"); }

Address CudaDriver::reserve(size_t bytes) {
  DevicePointer address = 0;
  check(cuda_.reserve(&address, bytes, 0, 0, 0), "cuMemAddressReserve");
  return address;
}

void CudaDriver::unreserve(Address address, size_t bytes) {
  check(cuda_.unreserve(address, bytes), "cuMemAddressFree");
}

void CudaDriver::map(Address address, size_t bytes, Block block) {
  check(cuda_.map(address, bytes, 0, block, 0), "cuMemMap");
}

void CudaDriver::allow_access(Address address, size_t bytes) {
  CudaAccess access{{kOnDevice, device_}, kReadWrite};
  check(cuda_.set_access(address, bytes, &access, 1), "cuMemSetAccess");
}

void CudaDriver::unmap(Address address, size_t bytes) { check(cuda_.unmap(address, bytes), "cuMemUnmap"); }

size_t CudaDriver::pool_unit_bytes() {
  // The driver documents no unit, and rounds a cap up to it: with a cap of 26 MiB a pool took 32. So measure it with
  // one small allocation, from a pool whose cap, rounded up, is one unit (S4).
  if (!pool_unit_bytes_) {
    Pool pool = create_pool(granularity_bytes_);
    Undo undo_pool([&] { destroy_pool(pool); });
    Address address = pool_allocate(pool, 1, nullptr);
    Undo undo_address([&] {
      pool_release(pool, address, nullptr);
      synchronize_stream(nullptr);
    });
    pool_unit_bytes_ = std::max(granularity_bytes_, pool_peak_bytes(pool));
  }
  return pool_unit_bytes_;
}

Pool CudaDriver::create_pool(size_t max_bytes) {
  CudaPoolProperties wanted{};
  wanted.type = kPinned;
  wanted.location = {kOnDevice, device_};
  wanted.max_bytes = max_bytes;
  Pool pool = nullptr;
  check(cuda_.pool_create(&pool, &wanted), "cuMemPoolCreate", Failure::device_memory);
  // Turn on all three kinds of reuse: after events, after completed frees, and with waits that the driver inserts.
  int on = 1;
  uint64_t keep_everything = UINT64_MAX;
  int code = cuda_.pool_set(pool, 1, &on);
  if (code == kSuccess) code = cuda_.pool_set(pool, 2, &on);
  if (code == kSuccess) code = cuda_.pool_set(pool, 3, &on);
  // Memory stays in the pool between runs; giving it back to the system and asking again would cost milliseconds.
  if (code == kSuccess) code = cuda_.pool_set(pool, 4, &keep_everything);
  if (code != kSuccess) {
    cuda_.pool_destroy(pool);
    check(code, "cuMemPoolSetAttribute");
  }
  return pool;
}

void CudaDriver::destroy_pool(Pool pool) { check(cuda_.pool_destroy(pool), "cuMemPoolDestroy"); }

Address CudaDriver::pool_allocate(Pool pool, size_t bytes, Stream stream) {
  DevicePointer address = 0;
  check(cuda_.pool_allocate(&address, bytes, pool, stream), "cuMemAllocFromPoolAsync");
  return address;
}

void CudaDriver::pool_release(Pool, Address address, Stream stream) {
  check(cuda_.pool_release(address, stream), "cuMemFreeAsync");
}

size_t CudaDriver::pool_peak_bytes(Pool pool) {
  uint64_t peak = 0;
  check(cuda_.pool_get(pool, 6, &peak), "cuMemPoolGetAttribute");
  return peak;
}

Stream CudaDriver::create_stream() {
  Stream stream = nullptr;
  int least = 0, greatest = 0;
  check(cuda_.stream_priorities(&least, &greatest), "cuCtxGetStreamPriorityRange");
  // Non-blocking: work on the legacy default stream, where torch computes unless told otherwise, must not wait for it.
  // Ahead of that work in priority: a later step waits for what is decoded, and the link for the slot that this frees.
  check(cuda_.stream_create(&stream, kNonBlocking, greatest), "cuStreamCreateWithPriority");
  return stream;
}

void CudaDriver::destroy_stream(Stream stream) { check(cuda_.stream_destroy(stream), "cuStreamDestroy"); }

void CudaDriver::synchronize_stream(Stream stream) { check(cuda_.synchronize(stream), "cuStreamSynchronize"); }

bool CudaDriver::is_capturing(Stream stream) {
  int status = 0;
  int code = cuda_.stream_is_capturing(stream, &status);
  // The driver refuses this query for the legacy default stream while another captures: that is an answer too.
  if (code == kCaptureImplicit) return true;
  check(code, "cuStreamIsCapturing");
  return status != 0;
}

Event CudaDriver::create_event(bool timing) {
  Event event = nullptr;
  check(cuda_.event_create(&event, timing ? 0 : kDisableTiming), "cuEventCreate");
  return event;
}

void CudaDriver::destroy_event(Event event) { check(cuda_.event_destroy(event), "cuEventDestroy"); }
void CudaDriver::record(Event event, Stream stream) { check(cuda_.event_record(event, stream), "cuEventRecord"); }
void CudaDriver::wait(Stream stream, Event event) { check(cuda_.stream_wait(stream, event, 0), "cuStreamWaitEvent"); }

void CudaDriver::record_external(Event event, Stream stream) {
  // The driver refuses the flag outside a capture.
  unsigned flags = is_capturing(stream) ? kEventExternal : 0;
  check(cuda_.event_record_with_flags(event, stream, flags), "cuEventRecordWithFlags");
}

void CudaDriver::wait_external(Stream stream, Event event) {
  unsigned flags = is_capturing(stream) ? kEventExternal : 0;
  check(cuda_.stream_wait(stream, event, flags), "cuStreamWaitEvent");
}

void CudaDriver::begin_capture(Stream stream) {
  // Thread-local: the capture does not restrict other threads.
  check(cuda_.begin_capture(stream, kCaptureThreadLocal), "cuStreamBeginCapture");
}

Graph CudaDriver::end_capture(Stream stream) {
  void* captured = nullptr;
  check(cuda_.end_capture(stream, &captured), "cuStreamEndCapture");
  void* instance = nullptr;
  int code = cuda_.graph_instantiate(&instance, captured, 0);
  cuda_.graph_destroy(captured);  // the instance has everything it needs
  check(code, "cuGraphInstantiateWithFlags");
  return instance;
}

void CudaDriver::launch_graph(Graph graph, Stream stream) { check(cuda_.graph_launch(graph, stream), "cuGraphLaunch"); }
void CudaDriver::destroy_graph(Graph graph) { check(cuda_.graph_instance_destroy(graph), "cuGraphExecDestroy"); }

void CudaDriver::synchronize_event(Event event) { check(cuda_.event_synchronize(event), "cuEventSynchronize"); }

bool CudaDriver::is_complete(Event event) {
  int code = cuda_.event_query(event);
  if (code == kNotReady) return false;
  check(code, "cuEventQuery");
  return true;
}

int64_t CudaDriver::elapsed_ns(Event from, Event to) {
  float milliseconds = 0;
  check(cuda_.event_elapsed(&milliseconds, from, to), "cuEventElapsedTime");
  return std::llround((double)milliseconds * 1e6);
}

void CudaDriver::copy_to_device(Address to, const void* from, size_t bytes, Stream stream) {
  check(cuda_.copy_to_device(to, from, bytes, stream), "cuMemcpyHtoDAsync");
}

void CudaDriver::copy_to_host(void* to, Address from, size_t bytes, Stream stream) {
  check(cuda_.copy_to_host(to, from, bytes, stream), "cuMemcpyDtoHAsync");
}

void CudaDriver::fill(Address to, unsigned char value, size_t bytes, Stream stream) {
  check(cuda_.fill(to, value, bytes, stream), "cuMemsetD8Async");
}

void CudaDriver::launch_linear(const LinearRecipe& recipe, const LinearCall& call, Stream stream) {
  CudaOutcome outcome = penstock::launch_linear(cuda_, recipe, call, stream);
  check(outcome.code, outcome.call);
}

void CudaDriver::prepare_decoding() {
  CudaOutcome outcome = decoder_.load(device_);
  check(outcome.code, outcome.call, Failure::kernel);
}

void CudaDriver::decode(const DecodeCall& call, Stream stream) {
  CudaOutcome outcome = decoder_.launch(call, stream);
  check(outcome.code, outcome.call);
}

void CudaDriver::prepare_experts() {
  CudaOutcome outcome = experts_.load(device_);
  check(outcome.code, outcome.call, Failure::kernel);
}

void CudaDriver::choose_experts(const ChooseCall& call, Stream stream) {
  CudaOutcome outcome = experts_.choose(call, stream);
  check(outcome.code, outcome.call);
}

void CudaDriver::move_experts(const MoveCall& call, Stream stream) {
  CudaOutcome outcome = experts_.move(call, stream);
  check(outcome.code, outcome.call);
}

void CudaDriver::shift_rows(const ShiftCall& call, Stream stream) {
  CudaOutcome outcome = experts_.shift(call, stream);
  check(outcome.code, outcome.call);
}

void CudaDriver::register_host(const void* start, size_t bytes) {
  check(cuda_.host_register(const_cast<void*>(start), bytes, kRegisterPortable | kRegisterReadOnly),
        "cuMemHostRegister", Failure::registration);
}

void CudaDriver::unregister_host(const void* start) {
  check(cuda_.host_unregister(const_cast<void*>(start)), "cuMemHostUnregister", Failure::registration);
}

Address CudaDriver::host_address(const void* start, size_t) {
  DevicePointer address = 0;
  check(cuda_.host_device_pointer(&address, const_cast<void*>(start), 0), "cuMemHostGetDevicePointer",
        Failure::registration);
  return address;
}

void* CudaDriver::allocate_host(size_t bytes) {
  void* start = nullptr;
  check(cuda_.host_alloc(&start, bytes, kRegisterPortable), "cuMemHostAlloc", Failure::registration);
  return start;
}

void CudaDriver::free_host(void* start) { check(cuda_.host_free(start), "cuMemFreeHost", Failure::registration); }

}  // namespace penstock
