// A loop in threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

namespace penstock {

// Calls visit(0) to visit(count - 1), in any order, in at most `threads` threads including the caller's. visit must not
// throw.
template <typename Visit>
void in_parallel(int64_t count, int64_t threads, Visit visit) {
  std::atomic<int64_t> next{0};
  auto work = [&] {
    for (int64_t i = next++; i < count; i = next++) visit(i);
  };
  std::vector<std::thread> others;
  // If a thread cannot be created, the others do its work; the caller does it alone if it must.
  try {
    for (int64_t i = 1; i < threads && i < count; ++i) others.emplace_back(work);
  } catch (const std::exception&) {
  }
  work();
  for (std::thread& other : others) other.join();
}

}  // namespace penstock
