// One session for all delegates of a loaded program: one budget, one ring, whatever the number of its methods.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "budget.h"
#include "mapping.h"
#include "payload.h"
#include "penstock_core.h"
#include "sharing.h"

namespace penstock_executorch {

// Where the weights of a program lie: one file.
struct WeightsPlace {
  std::string path;
  uint64_t device;
  uint64_t inode;
  int64_t file_bytes;
  struct Span {  // as the core takes them
    int64_t begin_bytes;
    int64_t bytes;
  };
  // What each weight has of the file, in the order of Description::weights, by which plans number them.
  std::vector<Span> spans;
  PackedWeights packed;
};

struct SessionRequest {
  BudgetRequest budget;
  // By delegate: each one named here gets a session of its own.
  std::map<std::string, BudgetRequest> own_budgets;
  // Tells programs that are loaded twice apart, if the caller sets it.
  std::string group;
  // Of a GPU; torch's current one by default.
  std::optional<int32_t> device_index;
  // The most host memory to stage weights through; 0: the file is held in memory, registered with the device.
  int64_t host_cap_bytes = 0;
  // Runs are captured, and replayed as CUDA graphs.
  bool cuda_graph = false;
  // Logs nothing about what was loaded.
  bool quiet = false;
};

struct SessionFacts {
  int64_t floor_bytes;
  int64_t full_bytes;
  int64_t budget_bytes;
  int64_t asked_bytes;
  int64_t source;
  int64_t plan;
  int64_t plan_count;
  int64_t plan_bytes;
};

// What the core counted.
struct SessionCounters {
  PenstockCounters last_run;
  PenstockCounters totals;
  int64_t device_bytes;
  int64_t peak_device_bytes;
  // Of copies as the plan makes them, timed when it was installed; 0 if it makes none.
  int64_t link_bytes_per_s;
};

// What two delegates must have in common to share a session: program, file (two numbers), group, budget, the delegate
// if it is alone, device, cap on host memory, whether runs are graphs.
using SessionKey =
    std::tuple<std::string, uint64_t, uint64_t, std::string, int64_t, int64_t, int32_t, int64_t, bool>;

// Who keeps memory for the present plan, and how each gives it up.
using PlanMemory = std::map<const void*, std::function<void()>>;

class ProgramSession {
 public:
  // Makes the core's session for the delegates of a plan table. `alone`: for one delegate with a budget of its own.
  ProgramSession(const Payload& payload, const PlanTable& table, const BudgetRequest& budget,
                 const WeightsPlace& weights, const SessionRequest& request, int32_t device_index, bool alone);
  // Uses a session that somebody else made and owns.
  ProgramSession(void* session, int32_t device_index) : device_index_(device_index), session_(session, keep) {}
  ProgramSession(const ProgramSession&) = delete;
  ProgramSession& operator=(const ProgramSession&) = delete;

  void* handle() const { return session_.get(); }
  int32_t device_index() const { return device_index_; }
  SessionFacts facts() const;
  // What it was set up to do, a line each, the first in Python's words: once after it was made, and once after each
  // change of its budget. Nothing if it is quiet.
  std::vector<std::string> take_news();
  // Installs the largest plan that the budget allows in place of the present one. Throws LoadError(busy) during a run,
  // or LoadError(below_floor), or what the core says; the budget then stays what it was.
  void set_budget(const BudgetRequest& asked);
  // Waits for a run to end.
  SessionCounters counters();
  // Copies timed when the plan was installed, three numbers each: how many one after the other, their total bytes,
  // nanoseconds. First as the plan makes them, then some of each size.
  std::vector<int64_t> link();
  // Records runs until it is stopped: seven numbers a span, as SpanRecord of the core has them. Call both between runs:
  // they throw LoadError(busy) during one. Stopping throws if nothing was started.
  void start_trace();
  std::vector<int64_t> stop_trace();
  bool is_tracing() const { return is_tracing_; }
  // Held by a run, one at a time because delegates of one program share the ring, and by any other use of the session.
  std::mutex& running() { return running_; }
  // Marks a run for as long as it lives.
  class Run {
   public:
    explicit Run(ProgramSession& session) : alone_(session.running_), is_running_(session.is_running_) { is_running_ = true; }
    ~Run() { is_running_ = false; }

   private:
    std::lock_guard<std::mutex> alone_;
    std::atomic<bool>& is_running_;
  };
  // Given up before another plan is installed, while nothing is at work. Use it under running().
  PlanMemory& plan_memory() { return plan_memory_; }
  // The only delegate that uses this session; empty if delegates share it.
  const std::string& own_delegate() const { return own_delegate_; }

 private:
  int32_t device_index_;
  using Owned = std::unique_ptr<void, void (*)(void*)>;
  static void keep(void*) {}
  Owned driver_{nullptr, keep};
  Owned session_{nullptr, keep};
  std::string own_delegate_;
  // The program's numbers of the delegates, in the order in which the core counts them.
  std::vector<int64_t> methods_;
  std::vector<ReadyPlan> plans_;
  // False if the core refused it.
  bool installs(size_t plan);
  // Call it after an install.
  std::vector<std::string> lines_about(const SessionFacts& facts);
  std::unique_lock<std::mutex> between_runs(const std::string& what);
  std::atomic<bool> is_tracing_{false};
  std::atomic<bool> is_running_{false};
  PlanMemory plan_memory_;
  BudgetTerms budget_terms_{};
  // False if neither a new plan nor the one before it could be installed.
  bool has_plan_ = true;
  mutable std::mutex facts_lock_;
  SessionFacts facts_{};
  // For the lines about it.
  bool quiet_ = false;
  bool cuda_graph_ = false;
  std::string shown_;
  std::string place_;
  std::string weights_text_;
  std::vector<std::string> method_names_;
  int64_t copying_bytes_ = 0;
  std::vector<std::string> news_;
  std::mutex running_;
};

using Sessions = Sharing<SessionKey, ProgramSession>;
Sessions& sessions();

// The session for delegate `method` of the program: one of the same program, file, device, group and budget.
Sessions::PlaceRef take_session(const Payload& payload, int64_t method, const WeightsPlace& weights,
                                const SessionRequest& request, int32_t device_index);

// The only session that the delegates share, or that a delegate has alone. Throws LoadError(option) if there is none,
// or more than one.
std::shared_ptr<ProgramSession> only_session(const std::string& group, const std::string& delegate);

}  // namespace penstock_executorch
