// Fibers for the threads of one cluster, barriers they wait at, and copies under way. One operating system thread.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "split_params.h"

namespace penstock {

// Where a block's own shared memory starts: no place that a kernel could count on.
constexpr u32 kSharedStart = 1040;
// Addresses of shared memory have the rank of its CTA above these bits.
constexpr u32 kRankShift = 24;
constexpr u32 in_cta(u32 address, u32 rank) { return (address & ((1u << kRankShift) - 1)) | rank << kRankShift; }

struct Barrier {
  u32 count = 0;
  u32 pending = 0;
  long long bytes = 0;
  u32 phase = 0;

  void arrive() {
    if (pending == 0) throw std::runtime_error("one arrival too many at a barrier");
    --pending;
    settle();
  }
  void settle() {
    if (pending || bytes) return;
    ++phase;
    pending = count;
  }
  // A parity stands for the phase before the current one once that has ended.
  bool ended(u32 parity) const { return (phase & 1) != parity; }
};

// Where a fixed number of fibers meet.
struct Meeting {
  u32 arrived = 0;
  u32 round = 0;
};

struct Cta {
  u32 rank = 0;
  std::vector<unsigned char> memory;
  std::map<u32, Barrier> barriers;
  std::map<u32, Meeting> named;
  std::map<u32, Meeting> warps;
  // What lanes of a warp show one another, in turns: who is ahead writes where nobody still reads.
  u32 exchange[2][512][6];
  // Threads that have not ended. Without any the shared memory is gone.
  u32 left = 0;

  unsigned char* at(u32 address, u32 bytes) {
    if (!left) throw std::runtime_error("shared memory of a CTA that has ended");
    if (address >> kRankShift != rank) throw std::runtime_error("shared memory of another CTA");
    const u32 offset = in_cta(address, 0);
    if (offset < kSharedStart || offset + bytes > memory.size())
      throw std::runtime_error("shared memory at " + std::to_string(offset) + " of " + std::to_string(memory.size()));
    return memory.data() + offset;
  }
  Barrier& barrier(u32 address) {
    if (!left) throw std::runtime_error("a barrier of a CTA that has ended");
    auto found = barriers.find(address);
    if (found == barriers.end()) throw std::runtime_error("a barrier that was not initialised");
    return found->second;
  }
};

struct Fiber {
  Cta* cta = nullptr;
  u32 thread = 0;
  u32 site = 0;
  u32 exchanges = 0;
  int committed = 0;
  std::deque<std::function<void()>> products;
  std::vector<char> stack;
  ucontext_t context;
  bool done = false;
  // What it waits for; neither: it can go on.
  Barrier* barrier = nullptr;
  u32 parity = 0;
  Meeting* meeting = nullptr;
  u32 round = 0;

  bool ready() const {
    if (barrier) return barrier->ended(parity);
    return !meeting || meeting->round != round;
  }
};

struct Machine {
  u32 cluster = 0, threads = 0;
  std::vector<Cta> ctas;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<std::function<void()>> copies;
  Meeting everyone;
  u64 host_bytes_read = 0;
  std::set<u64> stored;
  std::mt19937_64 random;
  std::function<void()> kernel;
  std::string failure;
  Fiber* running = nullptr;
  ucontext_t scheduler;

  void yield() { swapcontext(&running->context, &scheduler); }
  void wait(Barrier& barrier, u32 parity) {
    running->barrier = &barrier, running->parity = parity;
    yield();
    running->barrier = nullptr;
  }
  void meet(Meeting& meeting, u32 count) {
    if (++meeting.arrived == count) {
      meeting.arrived = 0, ++meeting.round;
      return;
    }
    running->meeting = &meeting, running->round = meeting.round;
    yield();
    running->meeting = nullptr;
  }
  // Every result is stored once, by one thread of the whole grid.
  void store(u64 address, unsigned short bits) {
    if (!stored.insert(address).second) throw std::runtime_error("a result that is stored twice");
    std::memcpy((void*)address, &bits, 2);
  }

  void run_cluster(u32 index, u32 size, u32 shared_bytes, int copies_land);
};

inline Machine*& machine_pointer() {
  static Machine* pointer = nullptr;
  return pointer;
}
inline Machine& machine() { return *machine_pointer(); }
inline Fiber& self() { return *machine().running; }

inline void fiber_main() {
  try {
    machine().kernel();
  } catch (const std::exception& error) {
    if (machine().failure.empty()) machine().failure = error.what();
  }
  self().done = true;
  machine().yield();
}

// copies_land: 0 whenever the dice say so, 1 at once, 2 not before nobody can go on without them.
inline void Machine::run_cluster(u32 index, u32 size, u32 shared_bytes, int copies_land) {
  cluster = index;
  everyone = {};
  copies.clear();
  fibers.clear();
  ctas.assign(size, Cta{});
  for (u32 rank = 0; rank < size; ++rank) {
    ctas[rank].rank = rank;
    ctas[rank].left = threads;
    // Not a number: a slot that is read before it is filled shows.
    ctas[rank].memory.assign(kSharedStart + shared_bytes, 0xff);
    for (u32 thread = 0; thread < threads; ++thread) {
      auto fiber = std::make_unique<Fiber>();
      fiber->cta = &ctas[rank], fiber->thread = thread;
      fiber->stack.resize(64 << 10);
      getcontext(&fiber->context);
      fiber->context.uc_stack.ss_sp = fiber->stack.data();
      fiber->context.uc_stack.ss_size = fiber->stack.size();
      fiber->context.uc_link = nullptr;
      makecontext(&fiber->context, fiber_main, 0);
      fibers.push_back(std::move(fiber));
    }
  }
  auto land_one = [&] {
    const size_t pick = random() % copies.size();
    auto copy = copies[pick];
    copies[pick] = copies.back();
    copies.pop_back();
    copy();
  };
  size_t left = fibers.size();
  while (left && failure.empty()) {
    bool moved = false;
    const size_t from = random() % fibers.size();
    for (size_t i = 0; i < fibers.size() && failure.empty(); ++i) {
      while (!copies.empty() && (copies_land == 1 || (copies_land == 0 && random() % 64 == 0))) {
        land_one();
        moved = true;
      }
      Fiber& fiber = *fibers[(from + i) % fibers.size()];
      if (fiber.done || !fiber.ready()) continue;
      moved = true;
      running = &fiber;
      swapcontext(&scheduler, &fiber.context);
      if (fiber.done) --left, --fiber.cta->left;
    }
    if (!moved && copies.empty()) {
      std::map<u32, int> sites;
      for (auto& fiber : fibers)
        if (!fiber->done) ++sites[fiber->barrier ? fiber->site : 0];
      failure = "nobody can go on; threads by the site they wait at:";
      for (auto& [site, count] : sites) failure += " " + std::to_string(site) + ": " + std::to_string(count);
    }
    if (!moved && !copies.empty()) land_one();
  }
  if (failure.empty() && !copies.empty()) failure = "copies are under way after the end";
}

}  // namespace penstock
