// csrc/experts/experts.cu for the host. The threads of a block are contexts of one thread: each runs to its next vote,
// shuffle or barrier, in an order that the caller chooses, and none goes on before all have come that far. So what a
// barrier too few would do shows in some order, and always in the same. For tests without a GPU.
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#define __device__
#define __global__
#define __grid_constant__
#define __shared__ static
#define __launch_bounds__(...)

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct Extent {
  unsigned x;
};
static Extent threadIdx, blockIdx, gridDim;

namespace {

constexpr size_t kStackBytes = 64 << 10;
struct Trapped {};

// Contexts are only begun as such: each switch of theirs is a system call, of which jumps need none.
struct Lane {
  ucontext_t context;
  jmp_buf place;
  std::unique_ptr<char[]> stack;
  bool has_begun;
  bool has_ended;
  unsigned long long told;
};
std::vector<Lane> lanes;
jmp_buf scheduler;
bool is_trapped;
void (*body)();

void meet() {
  if (!_setjmp(lanes[threadIdx.x].place)) _longjmp(scheduler, 1);
}

// To its next meeting.
void go_on(Lane& lane) {
  if (_setjmp(scheduler)) return;
  if (lane.has_begun) _longjmp(lane.place, 1);
  lane.has_begun = true;
  setcontext(&lane.context);
}

[[noreturn]] void run_lane() {
  try {
    body();
  } catch (const Trapped&) {
    is_trapped = true;
  }
  lanes[threadIdx.x].has_ended = true;
  _longjmp(scheduler, 1);
}

void begin(Lane& lane) {
  if (!lane.stack) lane.stack.reset(new char[kStackBytes]);
  getcontext(&lane.context);
  lane.context.uc_stack.ss_sp = lane.stack.get();
  lane.context.uc_stack.ss_size = kStackBytes;
  lane.context.uc_link = nullptr;
  lane.has_begun = lane.has_ended = false;
  makecontext(&lane.context, run_lane, 0);
}

// order: 0 from the first lane on, 1 from the last; any other is at random, another each time.
void run_block(unsigned threads, unsigned order) {
  if (lanes.size() < threads) lanes.resize(threads);
  std::vector<unsigned> turns(threads);
  std::iota(turns.begin(), turns.end(), 0u);
  if (order == 1) std::reverse(turns.begin(), turns.end());
  std::mt19937 random(order);
  for (unsigned lane = 0; lane < threads; ++lane) begin(lanes[lane]);
  // Those beside one that has trapped may come as far as their next barrier, and no further.
  for (bool goes_on = true; goes_on && !is_trapped;) {
    if (order > 1) std::shuffle(turns.begin(), turns.end(), random);
    goes_on = false;
    for (unsigned lane : turns) {
      if (lanes[lane].has_ended) continue;
      threadIdx.x = lane;
      go_on(lanes[lane]);
      goes_on = goes_on || !lanes[lane].has_ended;
    }
  }
}

template <typename Call>
int launch(void (*kernel)(Call), const Call& call, unsigned blocks, unsigned threads, unsigned order) {
  static void (*now)(Call);
  static Call with;
  now = kernel, with = call;
  body = [] { now(with); };
  gridDim.x = blocks;
  is_trapped = false;
  for (unsigned block = 0; block < blocks && !is_trapped; ++block) {
    blockIdx.x = order == 1 ? blocks - 1 - block : block;
    run_block(threads, order);
  }
  return is_trapped;
}

template <typename Value>
Value from_lane(Value mine, unsigned lane) {
  lanes[threadIdx.x].told = (unsigned long long)mine;
  meet();
  const Value found = (Value)lanes[lane].told;
  meet();
  return found;
}

void __syncwarp() { meet(); }
void __syncthreads() { meet(); }
[[noreturn]] void __trap() { throw Trapped{}; }
int __popc(unsigned bits) { return __builtin_popcount(bits); }
void atomicOr(unsigned* word, unsigned bits) { *word |= bits; }

unsigned __ballot_sync(unsigned, bool is_so) {
  lanes[threadIdx.x].told = is_so;
  meet();
  unsigned found = 0;
  for (unsigned lane = 0; lane < 32; ++lane) found |= (unsigned)lanes[lane].told << lane;
  meet();
  return found;
}

template <typename Value>
Value __shfl_xor_sync(unsigned, Value mine, int distance) {
  return from_lane(mine, threadIdx.x ^ (unsigned)distance);
}

}  // namespace

#include "experts/experts.cu"

using namespace penstock;

// Each says whether a lane has trapped.
extern "C" {

int choose_on_host(const ChooseCall* call, unsigned order) {
  return launch(penstock_choose_experts, *call, 1, 32, order);
}

int move_on_host(const MoveCall* call, unsigned blocks, unsigned order) {
  return launch(call->by_ends ? penstock_move_groups : penstock_move_rows, *call, blocks, kThreads, order);
}

int shift_on_host(const ShiftCall* call, unsigned blocks, unsigned order) {
  return launch(penstock_shift_rows, *call, blocks, kThreads, order);
}

}  // extern "C"
