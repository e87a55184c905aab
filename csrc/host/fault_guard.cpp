// The handler is process-wide, and others install theirs too (Python's faulthandler, sanitizers), before us or after
// us. So every guarded call asks who holds SIGBUS (one system call, small beside a copy) and takes it back if somebody
// replaced us. The handlers that we replaced are kept, newest last. A SIGBUS that is not ours goes to the newest of
// them. It may pass the signal on to the handler that it replaced, which may be us again: each re-entry in a thread
// goes one handler further back, and past the oldest the process ends as it would have without us. A handler installed
// during a guarded call wins until the next guarded call.
#include "host/fault_guard.h"

#include <csetjmp>
#include <csignal>
#include <cstdint>
#include <cstring>

#include <atomic>
#include <mutex>

#include <ucontext.h>
#include <unistd.h>

namespace penstock {
namespace {

struct Region {
  sigjmp_buf jump;
  uintptr_t start;
  uintptr_t end;
};

// Initial-exec: the handler may run on a thread that never touched these, and must not allocate them there.
// Volatile: the compiler sees no reader between setting and clearing.
__attribute__((tls_model("initial-exec"))) thread_local Region* volatile current_region = nullptr;
__attribute__((tls_model("initial-exec"))) thread_local volatile int chain_depth = 0;

constexpr int kMaxReplaced = 8;
struct sigaction replaced[kMaxReplaced];
std::atomic<int> replaced_count{0};
std::mutex install_mutex;

constexpr int kMaxMappings = 64;
constexpr size_t kMaxPath = 512;
constexpr uintptr_t kClaimed = 1;  // being filled in; no mapping starts there

struct Mapping {
  std::atomic<uintptr_t> start{0};  // 0: free
  std::atomic<uintptr_t> end{0};
  char path[kMaxPath] = {};
};
Mapping mappings[kMaxMappings];

// Only what a signal handler may do: a buffer on the stack and one write.
class Line {
 public:
  void add(const char* text) {
    while (*text && used_ < sizeof(text_) - 1) text_[used_++] = *text++;
  }
  void add_hex(uintptr_t value) {
    char digits[2 * sizeof(value) + 1];
    char* at = digits + sizeof(digits) - 1;
    *at = 0;
    do {
      *--at = "0123456789abcdef"[value & 15];
      value >>= 4;
    } while (value);
    add("0x");
    add(at);
  }
  void write_out() {
    text_[used_++] = '\n';
    // Nothing can be done about a closed stderr in a process that is about to end.
    [[maybe_unused]] ssize_t written = ::write(STDERR_FILENO, text_, used_);
  }

 private:
  char text_[kMaxPath + 256];
  size_t used_ = 0;
};

void report(const siginfo_t* info) {
  auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  Line line;
  line.add("penstock: SIGBUS at address ");
  line.add_hex(address);
  for (const Mapping& mapping : mappings) {
    uintptr_t start = mapping.start.load(std::memory_order_acquire);
    if (start <= kClaimed || address < start || address >= mapping.end.load(std::memory_order_relaxed)) continue;
    line.add(", in the mapping of weights file ");
    line.add(mapping.path);
    line.add(": the file was truncated while it was in use, or its disk cannot be read");
    break;
  }
  line.write_out();
}

void end_process(int signal_number) {
  struct sigaction standard = {};
  standard.sa_handler = SIG_DFL;
  sigaction(signal_number, &standard, nullptr);
  raise(signal_number);
}

void hand_on(int signal_number, siginfo_t* info, void* context) {
  int index = replaced_count.load(std::memory_order_acquire) - 1 - chain_depth;
  if (index < 0) return end_process(signal_number);
  const struct sigaction& before = replaced[index];
  chain_depth = chain_depth + 1;
  if (before.sa_flags & SA_SIGINFO) {
    before.sa_sigaction(signal_number, info, context);
  } else if (before.sa_handler == SIG_IGN) {
    // The kernel lets a process ignore a signal that was sent, but not a fault.
    if (info->si_code > 0) end_process(signal_number);
  } else if (before.sa_handler == SIG_DFL) {
    end_process(signal_number);
  } else {
    before.sa_handler(signal_number);
  }
  chain_depth = chain_depth - 1;
}

void on_bus_error(int signal_number, siginfo_t* info, void* context) {
  Region* region = current_region;
  bool is_fault = info->si_code > 0;
  auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  if (is_fault && region && address >= region->start && address < region->end) {
    current_region = nullptr;
    // Restores the mask that a return from the handler would restore. (Saving it in sigsetjmp would cost a system call
    // for each guarded call. Sanitizers also call this from a handler of theirs that blocks every signal.)
    pthread_sigmask(SIG_SETMASK, &static_cast<ucontext_t*>(context)->uc_sigmask, nullptr);
    siglongjmp(region->jump, 1);
  }
  if (is_fault && chain_depth == 0) report(info);
  // Sanitizers block every signal here, but the handlers before us rely on SIGBUS being delivered when they raise it.
  sigset_t bus_error;
  sigemptyset(&bus_error);
  sigaddset(&bus_error, SIGBUS);
  pthread_sigmask(SIG_UNBLOCK, &bus_error, nullptr);
  hand_on(signal_number, info, context);
}

bool is_ours(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) && action.sa_sigaction == on_bus_error;
}

bool is_same(const struct sigaction& a, const struct sigaction& b) {
  if ((a.sa_flags & SA_SIGINFO) != (b.sa_flags & SA_SIGINFO)) return false;
  return (a.sa_flags & SA_SIGINFO) ? a.sa_sigaction == b.sa_sigaction : a.sa_handler == b.sa_handler;
}

void ensure_installed() noexcept {
  struct sigaction now;
  if (sigaction(SIGBUS, nullptr, &now) == 0 && is_ours(now)) return;
  std::lock_guard<std::mutex> lock(install_mutex);
  sigaction(SIGBUS, nullptr, &now);
  if (is_ours(now)) return;
  // A handler that comes back (faulthandler disabled and enabled again) takes its old place, so the list stays short.
  int count = replaced_count.load(std::memory_order_relaxed);
  int index = 0;
  while (index < count && !is_same(replaced[index], now)) index++;
  if (index == kMaxReplaced) index = kMaxReplaced - 1;
  replaced[index] = now;
  replaced_count.store(index + 1, std::memory_order_release);
  struct sigaction ours = {};
  ours.sa_sigaction = on_bus_error;
  // Not deferred: a handler that passes the signal on raises it again, and expects it to be delivered at once.
  ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  sigemptyset(&ours.sa_mask);
  sigaction(SIGBUS, &ours, nullptr);
}

void touch_pages(const void* start, size_t bytes) {
  static const size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE);
  auto* first = static_cast<const volatile unsigned char*>(start);
  size_t to_next_page = page_bytes - reinterpret_cast<uintptr_t>(start) % page_bytes;
  (void)first[0];
  for (size_t at = to_next_page; at < bytes; at += page_bytes) (void)first[at];
}

// `read` must have no destructor on its frames, because the handler jumps over them.
template <typename Read>
bool guarded(const void* start, size_t bytes, Read read) noexcept {
  if (!bytes) return true;
  ensure_installed();
  Region region;
  region.start = reinterpret_cast<uintptr_t>(start);
  region.end = region.start + bytes;
  if (sigsetjmp(region.jump, 0)) return false;
  current_region = &region;
  std::atomic_signal_fence(std::memory_order_seq_cst);
  read();
  std::atomic_signal_fence(std::memory_order_seq_cst);
  current_region = nullptr;
  return true;
}

}  // namespace

bool guarded_copy(void* to, const void* from, size_t bytes) noexcept {
  return guarded(from, bytes, [=] { std::memcpy(to, from, bytes); });
}

bool guarded_touch(const void* start, size_t bytes) noexcept {
  return guarded(start, bytes, [=] { touch_pages(start, bytes); });
}

int remember_mapping(const void* start, size_t bytes, const char* path) noexcept {
  ensure_installed();
  for (int ticket = 0; ticket < kMaxMappings; ++ticket) {
    Mapping& mapping = mappings[ticket];
    uintptr_t is_free = 0;
    if (!mapping.start.compare_exchange_strong(is_free, kClaimed, std::memory_order_acquire)) continue;
    std::strncpy(mapping.path, path, kMaxPath - 1);
    mapping.end.store(reinterpret_cast<uintptr_t>(start) + bytes, std::memory_order_relaxed);
    mapping.start.store(reinterpret_cast<uintptr_t>(start), std::memory_order_release);
    return ticket;
  }
  return -1;
}

void forget_mapping(int ticket) noexcept {
  if (ticket >= 0) mappings[ticket].start.store(0, std::memory_order_release);
}

}  // namespace penstock
