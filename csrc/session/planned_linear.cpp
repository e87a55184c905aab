// Products with weights whose rows a plan may have split between two places.
#include "abi/torch_abi.h"
#include "linear/linear_operands.h"
#include "linear/linear_reference.h"
#include "session/planned_session.h"

namespace penstock {
namespace {
// A program with many linears, called with ever new numbers of tokens, must not fill memory. Capped at some 15 MB.
constexpr size_t kMostRecipes = 1 << 14;

std::string text(int64_t value) { return std::to_string(value); }
}  // namespace

void PlannedSession::offer_linear(PrepareLinear prepare) {
  require_idle();
  prepare_ = prepare;
  recipes_.clear();
}

// S5: sums all of a program's weights in one way, wherever the plan has put their rows.
void PlannedSession::multiply(const LinearRequest& request, TensorHandle* out) {
  int64_t position = fetched_position(request.access);
  const AccessRecord& access = plan_.methods[method_].accesses[position];
  if (!prepare_ && request.device_type != torch_abi().device_type_cpu()) {
    if (access.is_split())
      throw CoreError(Failure::usage, "the weight of access " + text(access.number) +
                                          " is split, and no kernel was offered that reads it in two places");
    return Session::multiply(request, out);
  }
  LinearOperands operands(request);
  if (operands.tokens()) {
    LinearCall call = operands.call();
    LinearCase which = case_of(position, operands);
    if (prepare_) driver_.launch_linear(recipe(which), call, compute_);
    else multiply_here(which, call);
  }
  *out = operands.release_result();
}

LinearCase PlannedSession::case_of(int64_t position, const LinearOperands& operands) const {
  const AccessRecord& access = plan_.methods[method_].accesses[position];
  int64_t row_bytes = operands.depth() * 2, bytes = operands.rows() * row_bytes;
  int64_t prefix_bytes = access.is_split() ? access.prefix_bytes : access.range == kDirect ? 0 : access.bytes;
  if (bytes != access.bytes || prefix_bytes % row_bytes)
    throw CoreError(Failure::divergence, "the linear of access " + text(access.number) + " is of " +
                                             text(operands.rows()) + " rows of " + text(row_bytes) +
                                             " bytes; the plan has " + text(access.bytes) + " bytes, of them " +
                                             text(prefix_bytes) + " in device memory, and needs whole rows");
  LinearCase which{};
  which.method = method_;
  which.access = access.number;
  which.tokens = operands.tokens();
  which.rows = operands.rows();
  which.depth = operands.depth();
  which.prefix_rows = prefix_bytes / row_bytes;
  which.prefix_address = prefix_bytes ? address_of(access) : 0;
  which.rest_address = methods_[method_].in_place[position];
  which.is_bf16 = operands.is_bf16();
  return which;
}

void PlannedSession::multiply_here(const LinearCase& which, const LinearCall& call) {
  if (compute_)
    throw CoreError(Failure::usage, "the linear of access " + text(which.access) +
                                        " was asked for on a stream, and without a kernel the calling thread makes it");
  reference_linear(which, call);
}

const LinearRecipe& PlannedSession::recipe(const LinearCase& which) {
  std::array<int64_t, 4> key{which.method, which.access, which.tokens, which.prefix_rows};
  auto found = recipes_.find(key);
  if (found != recipes_.end()) return found->second;
  std::string what = "the linear of access " + text(which.access) + " with " + text(which.tokens) + " tokens, " +
                     text(which.rows) + " rows of which " + text(which.prefix_rows) + " are in device memory, depth " +
                     text(which.depth);
  // A recipe compiles and loads kernels, which cannot happen inside a graph.
  if (capturing_) throw CoreError(Failure::capture, what + ", has not run before it is captured");
  LinearRecipe made{};
  if (prepare_(&which, &made)) throw CoreError(Failure::kernel, what + ", has no kernel");
  return recipes_.emplace(key, made).first->second;
}

// Before a run and not within it: whatever ran can then be captured.
void PlannedSession::forget_many_recipes() {
  if (recipes_.size() > kMostRecipes) recipes_.clear();
}

}  // namespace penstock
