// One session for all delegates of a loaded program: one budget, one ring, whatever the number of its methods.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "budget.h"
#include "mapping.h"
#include "payload.h"

namespace penstock_executorch {

// Where the weights of a program lie: one file.
struct WeightsPlace {
  std::string path;
  uint64_t device;
  uint64_t inode;
  int64_t file_bytes;
  struct Span {
    int64_t begin_bytes;
    int64_t bytes;
  };
  // In the order of Description::weights, by which plans number them: what of the file each has.
  std::vector<Span> spans;
  PackedWeights packed;
};

struct SessionRequest {
  BudgetRequest budget;
  // By delegate: one that is named here gets a session of its own.
  std::map<std::string, BudgetRequest> own_budgets;
  // Programs that are loaded twice are told apart by this, where the caller says it.
  std::string group;
  // Of a GPU; torch's current one if nothing is said.
  std::optional<int32_t> device_index;
  // The most host memory to stage weights through; 0: the file is held in memory, registered with the device.
  int64_t host_cap_bytes = 0;
  // Runs are captured, and replayed as CUDA graphs.
  bool cuda_graph = false;
  // No line in the log about what was loaded.
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

// What the core counted. The numbers of a run are penstock.runtime.session.Stats, in its order.
struct SessionCounters {
  static constexpr size_t kCount = 13;
  int64_t last_run[kCount];
  int64_t totals[kCount];
  int64_t device_bytes;
  int64_t peak_device_bytes;
  // Of copies as the plan makes them, timed when it was installed; 0 where it makes none.
  int64_t link_bytes_per_s;
};

// What two delegates must have in common to share a session: program, file (two numbers), group, budget, the delegate
// if it is alone, device, cap on host memory, whether runs are graphs.
using SessionKey =
    std::tuple<std::string, uint64_t, uint64_t, std::string, int64_t, int64_t, int32_t, int64_t, bool>;

class ProgramSession {
 public:
  // Makes the core's session for the delegates of a plan table; alone, for the only one.
  ProgramSession(const Payload& payload, const PlanTable& table, const BudgetRequest& budget,
                 const WeightsPlace& weights, const SessionRequest& request, int32_t device_index, bool alone);
  // Uses one that somebody else made, and keeps.
  ProgramSession(void* session, int32_t device_index) : device_index_(device_index), session_(session) {}
  ~ProgramSession();
  ProgramSession(const ProgramSession&) = delete;
  ProgramSession& operator=(const ProgramSession&) = delete;

  void* handle() const { return session_; }
  int32_t device_index() const { return device_index_; }
  SessionFacts facts() const;
  // What it was set up to do, a line each, the first of them in Python's words: once after it was made and after each
  // change of its budget. Nothing where nobody wants to know.
  std::vector<std::string> take_news();
  // The largest plan that the budget allows takes the place of the present one. Throws LoadError(busy) during a run, or
  // LoadError(below_floor), or what the core says; then the budget stays what it was.
  void set_budget(int64_t asked_bytes);
  // Waits for a run.
  SessionCounters counters();
  // Copies as they were timed when the plan was installed, three numbers each: how many one after the other, their bytes
  // together, nanoseconds. First as the plan makes them, then some of each size.
  std::vector<int64_t> link();
  // From here on until it is stopped, runs are recorded: seven numbers a span, as SpanRecord of the core has them. Between
  // runs; throw LoadError(busy) during one, and where nothing was started.
  void start_trace();
  std::vector<int64_t> stop_trace();
  bool is_tracing() const { return is_tracing_; }
  // Another one for each plan that was installed.
  const std::atomic<int64_t>& plan_number() const { return plan_number_; }
  // One run at a time: delegates of one program share the ring.
  std::mutex& running() { return running_; }
  // Methods whose delegates are here. Under the registry's lock.
  std::set<int64_t>& taken() { return taken_; }
  // The delegate whose session this is alone; empty where delegates share it.
  const std::string& own_delegate() const { return own_delegate_; }

 private:
  std::set<int64_t> taken_;
  int32_t device_index_;
  void* driver_ = nullptr;  // null: the session is somebody else's
  void* session_ = nullptr;
  std::string own_delegate_;
  std::vector<ReadyPlan> plans_;
  // False where the core refused it.
  bool installs(size_t plan);
  // After an install.
  std::vector<std::string> lines_about(const SessionFacts& facts);
  std::unique_lock<std::mutex> between_runs(const std::string& what);
  std::atomic<bool> is_tracing_{false};
  std::atomic<int64_t> plan_number_{0};
  // False where neither a new plan nor the one before it could be had.
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

// A delegate's place in a session. The session goes with the last of them.
class SessionRef {
 public:
  // `key`: of a session that was made here.
  SessionRef(std::shared_ptr<ProgramSession> session, int64_t method, int64_t number, std::optional<SessionKey> key = {})
      : session_(std::move(session)), method_(method), number_(number), key_(std::move(key)) {}
  ~SessionRef();
  SessionRef(const SessionRef&) = delete;
  SessionRef& operator=(const SessionRef&) = delete;

  ProgramSession& session() const { return *session_; }
  // Of the delegate, as the session counts.
  int64_t number() const { return number_; }

 private:
  std::shared_ptr<ProgramSession> session_;
  int64_t method_;
  int64_t number_;
  std::optional<SessionKey> key_;
};

// The session that delegate `method` of the program is to use. It joins the one that the other delegates of the same
// loading made: of the same program, file, device, group and budget, in which its own place is still free.
std::unique_ptr<SessionRef> take_session_ref(const Payload& payload, int64_t method, const WeightsPlace& weights,
                                const SessionRequest& request, int32_t device_index);

// Sessions that were made outside: delegate `methods[i]` of a group is to use `session`, which counts it as i.
void lend_session(const std::string& group, void* session, int32_t device_index, const std::vector<int64_t>& methods);
void reclaim_sessions(const std::string& group);
// Null where none was lent to the group; throws LoadError(package) where one was, but not for this delegate.
std::unique_ptr<SessionRef> take_shared_session_ref(const std::string& group, int64_t method);

// The sessions that were made here for a group.
std::vector<std::shared_ptr<ProgramSession>> find_sessions(const std::string& group);
// The first of them; null where there is none.
std::shared_ptr<ProgramSession> find_session(const std::string& group);
// The only one that the delegates share, or that a delegate has alone; throws LoadError(option) where there is none, or
// more than one.
std::shared_ptr<ProgramSession> only_session(const std::string& group, const std::string& delegate);

}  // namespace penstock_executorch
