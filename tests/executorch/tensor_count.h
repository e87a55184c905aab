// For builds with plays: how many blocks of tensor memory are alive, and how many there have been, once somebody asks.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstdlib>
#include <new>

namespace probe {

inline std::atomic<int64_t> alive{0}, made{0};

struct Counting final : c10::Allocator {
  static void give_back(void* at) {
    alive--;
    std::free(at);
  }
  at::DataPtr allocate(size_t bytes) override {
    void* at = nullptr;
    if (posix_memalign(&at, 64, bytes + 1)) throw std::bad_alloc();
    alive++;
    made++;
    return {at, at, &give_back, at::Device(at::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

}  // namespace probe

extern "C" {
inline __attribute__((used)) void probe_count_tensors() {
  static probe::Counting counting;
  c10::SetCPUAllocator(&counting, 200);
}
inline __attribute__((used)) int64_t probe_tensors_alive() { return probe::alive; }
inline __attribute__((used)) int64_t probe_tensors_made() { return probe::made; }
}
