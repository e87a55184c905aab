// Executes a plan: fixed addresses, resident prefixes, ring pages that stays take in turn. It decides nothing itself.
#pragma once

#include <array>
#include <map>
#include <set>

#include "experts/expert_calls.h"
#include "linear/linear_recipe.h"
#include "plan/plan_records.h"
#include "session/streaming_session.h"

namespace penstock {

class LinearOperands;

// Counts of one bank since the plan was installed.
struct ExpertCountsRecord {
  int64_t calls;
  int64_t hits;
  int64_t misses;
};

class PlannedSession final : public StreamingSession {
 public:
  PlannedSession(Driver& driver, Source& source, int32_t device_index, bool poison)
      : StreamingSession(driver, source, device_index, poison) {}
  ~PlannedSession() override { uninstall(); }

  // Creates the plan's memory and fills what is resident. If it throws, nothing of the plan is left.
  void install(PlanRecord plan);
  void uninstall() noexcept;

  // From now on a kernel computes all linears, so that results have the same bits wherever the rows lie. Without one
  // the library computes them on a GPU, and no weight may be split; on the CPU the calling thread sums them itself.
  void offer_linear(PrepareLinear prepare);

  // Copies rows of a fetched access to `out`, by `rows` numbers at `index`. Returns false after fail().
  bool take_rows(int64_t number, Address index, int64_t rows, Address out);
  // Both wait for the device.
  std::vector<ExpertCountsRecord> expert_counts();
  std::vector<HitRate> logged_hits(int64_t bank, const std::vector<int64_t>& slots);

  const PlanRecord& plan() const { return plan_; }
  // Physical bytes held for weights, now and at most.
  int64_t device_bytes() const { return device_bytes_; }
  int64_t peak_device_bytes() const { return peak_device_bytes_; }

 protected:
  void begin_run(bool cold) override;
  Address acquire(int64_t position) override;
  void multiply(const LinearRequest& request, TensorHandle* out) override;
  void take_rows(const RowsRequest& request, TensorHandle* out) override;
  void multiply_groups(const GroupedRequest& request, TensorHandle* out) override;
  void add_device_counts(Counters* last_run, Counters* totals) override;
  void step_ended(int64_t step) override;
  void end_run() override;
  void reset() noexcept override;
  void capture_begins() override;
  void capture_ends() override;
  void capture_failed() noexcept override { restore_progress(); }
  void replay_begins(bool cold) override;
  void replay_ends() override;

 private:
  struct MappedRange {
    Address address;
    size_t bytes;
    size_t mapped_bytes;
  };
  struct StayState {
    Event ready = nullptr;            // after the last of its copies
    Event ready_in_graph = nullptr;   // the same while captured; null until then
    std::vector<int64_t> copies;      // indices into the method's
    bool crosses = false;             // it is read on both sides of a run's end
  };
  struct StepState {
    Event ended = nullptr;           // null: no copy waits for it
    Event ended_in_graph = nullptr;  // the same while captured; null until then
    bool is_captured = false;        // it has ended in the present capture
    bool seen_outside = false;       // copies outside of the graph wait for it
    std::vector<int64_t> last_read;  // stays whose pages may be overwritten after it
  };
  // How far a stay has come, in the order of the host's calls.
  struct Progress {
    size_t issued = 0;  // copies, since it was last read to the end
    bool unread = false;
    bool before_graph = false;  // in a capture: the copies were made before the launch
  };
  struct MethodState {
    std::vector<Address> in_place;  // by position: where bytes outside of any range are read; 0: there are none
    std::vector<StayState> stays;
    std::vector<StepState> steps;
    std::vector<Progress> progress;  // by stay
    std::vector<PieceRecord> prologue;
    std::vector<PieceRecord> cycle;
    // A graph holds the copies up to the last one that its own run needs. Later copies are for the next run. They are
    // issued one by one behind each launch, so they need not have ended when the graph does.
    size_t graph_copies = 0;
    std::vector<Progress> after_graph;
    Counters graph_counters;
  };

  void create_memory();
  void give_packed_memory();
  void create_events();
  void find_in_place();
  void fill_residents();
  void measure();
  void create_capture_events(MethodState& method);
  void restore_progress() noexcept;
  void poison(const PieceRecord& piece, Stream stream);
  void issue(int64_t copy);
  void issue_until(int64_t position);
  void await_readers(StepState& step);
  void await_copies(StayState& stay, const Progress& progress);
  void announce(StayState& stay);
  void advance(MethodState& method, int64_t copy);
  static void forget_copies(MethodState& method) noexcept;
  Address address_of(const PieceRecord& piece) const;
  Address address_of(const AccessRecord& access) const;
  LinearCase case_of(int64_t position, const LinearOperands& operands) const;
  void multiply_here(const LinearCase& which, const LinearCall& call);
  Address table_of(int64_t bank) const;
  void prepare_experts();
  void empty_tables();
  void begin_tables();
  void begin_choices();
  void retire_expert_counts();
  bool uses_bank(int64_t method, size_t bank) const;
  std::vector<ExpertCounts> counts_now();
  void choose(const AccessRecord& access, Address index, int64_t rows, bool by_ends);
  MoveCall move_of(int64_t position, int64_t experts, int64_t row_bytes, Address index, int64_t rows) const;
  void take_rows(int64_t position, int64_t experts, int64_t row_bytes, Address index, int64_t rows, Address out);
  const std::vector<unsigned char>& table_now(int64_t bank);
  const LinearRecipe& recipe(const LinearCase& which);
  void forget_many_recipes();

  PlanRecord plan_;
  std::vector<Block> blocks_;
  std::vector<MappedRange> ranges_;
  std::vector<MethodState> methods_;
  size_t next_copy_ = 0;
  bool capturing_ = false;
  std::vector<Progress> before_capture_;
  // In a graph: where the branch of copies begins.
  Event fork_ = nullptr;
  // After the copies that were issued before a launch.
  Event lead_ = nullptr;
  PrepareLinear prepare_ = nullptr;
  // By method, access, tokens and rows of the prefix. Recipes hold addresses of the current plan.
  std::map<std::array<int64_t, 4>, LinearRecipe> recipes_;
  // By bank: whether this run has chosen from it.
  std::vector<bool> chosen_from_;
  // The accesses that this run has chosen by.
  std::set<int64_t> chosen_at_;
  // Whether the plan's tables have been initialized.
  bool has_tables_ = false;
  // A run has failed, and the tables still hold what it left in them.
  bool must_empty_tables_ = false;
  // Counts from earlier plans.
  Counters retired_;
  // Buffer that tables are read into. It is kept: if waiting for a copy failed, the copy may be made later.
  std::vector<unsigned char> read_back_;
  int64_t device_bytes_ = 0;
  int64_t peak_device_bytes_ = 0;
};

}  // namespace penstock
