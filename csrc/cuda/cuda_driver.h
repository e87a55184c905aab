// The driver table of a CUDA device, in its primary context: the one that torch uses.
#pragma once

#include "cuda/cuda_decode.h"
#include "cuda/cuda_experts.h"
#include "cuda/cuda_library.h"
#include "driver/driver.h"

namespace penstock {

class CudaDriver final : public Driver {
 public:
  // Throws DriverError when there is no driver or no such device.
  explicit CudaDriver(int ordinal);
  ~CudaDriver() override;

  void enter() override;
  void leave() noexcept override;
  MemoryInfo memory_info() override;
  int32_t probed_device() const override { return ordinal_; }

  size_t granularity_bytes() override { return granularity_bytes_; }
  Block create_block(size_t bytes) override;
  void release_block(Block block) override;
  Address reserve(size_t bytes) override;
  void unreserve(Address address, size_t bytes) override;
  void map(Address address, size_t bytes, Block block) override;
  void allow_access(Address address, size_t bytes) override;
  void unmap(Address address, size_t bytes) override;

  size_t pool_unit_bytes() override;
  Pool create_pool(size_t max_bytes) override;
  void destroy_pool(Pool pool) override;
  Address pool_allocate(Pool pool, size_t bytes, Stream stream) override;
  void pool_release(Pool pool, Address address, Stream stream) override;
  size_t pool_peak_bytes(Pool pool) override;

  Stream create_stream() override;
  void destroy_stream(Stream stream) override;
  void synchronize_stream(Stream stream) override;
  bool is_capturing(Stream stream) override;

  Event create_event(bool timing) override;
  void destroy_event(Event event) override;
  void record(Event event, Stream stream) override;
  void wait(Stream stream, Event event) override;
  void record_external(Event event, Stream stream) override;
  void wait_external(Stream stream, Event event) override;
  void begin_capture(Stream stream) override;
  Graph end_capture(Stream stream) override;
  void launch_graph(Graph graph, Stream stream) override;
  void destroy_graph(Graph graph) override;
  void synchronize_event(Event event) override;
  bool is_complete(Event event) override;
  int64_t elapsed_ns(Event from, Event to) override;

  void copy_to_device(Address to, const void* from, size_t bytes, Stream stream) override;
  void copy_to_host(void* to, Address from, size_t bytes, Stream stream) override;
  void fill(Address to, unsigned char value, size_t bytes, Stream stream) override;

  void launch_linear(const LinearRecipe& recipe, const LinearCall& call, Stream stream) override;

  void prepare_decoding() override;
  void decode(const DecodeCall& call, Stream stream) override;

  void prepare_experts() override;
  void choose_experts(const ChooseCall& call, Stream stream) override;
  void move_experts(const MoveCall& call, Stream stream) override;
  void shift_rows(const ShiftCall& call, Stream stream) override;

  void register_host(const void* start, size_t bytes) override;
  void unregister_host(const void* start) override;
  Address host_address(const void* start, size_t bytes) override;
  void* allocate_host(size_t bytes) override;
  void free_host(void* start) override;

 private:
  CudaAllocationProperties properties() const;

  const CudaLibrary& cuda_;
  const int32_t ordinal_;
  CudaDecoder decoder_;
  CudaExperts experts_;
  int device_ = 0;
  void* context_ = nullptr;
  size_t granularity_bytes_ = 0;
  size_t pool_unit_bytes_ = 0;  // 0: not asked yet
};

}  // namespace penstock
