// The backend as ExecuTorch's runtime sees it.
#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/core/exec_aten/util/tensor_util.h>
#include <executorch/runtime/platform/platform.h>
#include <sys/utsname.h>

#include <algorithm>
#include <new>

#include "blas.h"
#include "code.h"
#include "core.h"
#include "data_map.h"
#include "error_code.h"
#include "gpu.h"
#include "index_check.h"
#include "load_options.h"
#include "loaded_options.h"
#include "packed_entry.h"
#include "program_session.h"
#include "replays.h"
#include "load_error.h"
#include "state_table.h"
#include "tensor_layout.h"
#include "transfer_memory.h"

namespace penstock_executorch {
namespace {

using executorch::aten::SizesType;
using executorch::aten::Tensor;
using executorch::runtime::ArrayRef;
using executorch::runtime::BackendExecutionContext;
using executorch::runtime::BackendInitContext;
using executorch::runtime::BackendOption;
using executorch::runtime::BackendOptionContext;
using executorch::runtime::CompileSpec;
using executorch::runtime::DelegateHandle;
using executorch::runtime::Error;
using executorch::runtime::EValue;
using executorch::runtime::FreeableBuffer;
using executorch::runtime::NamedDataMap;
using executorch::runtime::Result;
using executorch::runtime::Span;

// Logs the whole text: ET_LOG cuts at 256 characters.
void log_line(et_pal_log_level_t level, const std::string& text) {
  std::string line = "penstock: " + text;
  executorch::runtime::pal_emit_log_message(executorch::runtime::pal_current_ticks(), level, "delegate.cpp", "penstock",
                                            __LINE__, line.c_str(), line.size());
}

// Nothing may be thrown through ExecuTorch, which knows no exceptions.
template <typename Action>
Error to_status(Action&& action) noexcept {
  try {
    action();
    return Error::Ok;
  } catch (...) {
    const LastRefusal& refusal = keep_refusal();
    log_line(kError, refusal.text);
    return code_of(refusal);
  }
}

struct Delegate {
  MethodFacts method;
  std::string device;
  // Null where the program has no state.
  States::PlaceRef state;
  Sessions::PlaceRef session;
  std::unique_ptr<TransferMemory> transfers;
  std::unique_ptr<CompiledCode> code;
  // Null if runs are not CUDA graphs.
  std::shared_ptr<GraphMemory> graph_memory;
  std::unique_ptr<Replays> replays;
};

// ------------------------------------------------------------------------------------------------------------ loading

// `gpu`: the GPU that it is to run on, if that is known.
void check_build(const Payload& payload, const Gpu* gpu, int32_t index) {
  struct utsname machine;
  uname(&machine);
  const std::string torch = torch_minor(), cpu = cpu_capability(), device = "cuda:" + std::to_string(index);
  const PenstockBuild built{payload.torch.c_str(),      payload.machine.c_str(), payload.cpu.c_str(),
                            payload.capability.c_str(), payload.gpu.c_str(),     nullptr};
  const PenstockBuild here{torch.c_str(), machine.machine, cpu.c_str(), gpu ? gpu->capability.c_str() : nullptr,
                           gpu ? gpu->name.c_str() : nullptr, device.c_str()};
  if (core().check_build(&built, &here)) throw LoadError(Kind::build, core().failure_text());
}

void check_program(const Payload& payload) {
  if (payload.device != "cpu" && payload.device != "cuda")
    throw LoadError(Kind::package,
                  "the program was compiled for '" + payload.device + "'; this library runs cpu and cuda");
  check_build(payload, nullptr, 0);
  if (payload.device == "cpu") check_blas();
}

// Refuses what runtime/options.py refuses, with the same messages.
void check_graphs(const Payload& payload, const SessionRequest& request) {
  const std::string option = "weight_offload_cuda_graph does not go with ";
  if (!request.cuda_graph) return;
  if (payload.device != "cuda")
    throw LoadError(Failure::capture, option + "a CPU: only a CUDA device has graphs; leave it out");
  if (request.host_cap_bytes)
    throw LoadError(Failure::capture, option + "a cap on host memory: the host fills buffers while it runs, and a graph "
                                               "runs without it");
  // Throws if this library was built without graphs, before anything is made.
  GraphMemory(0);
}

void check_delegate(const Payload& payload, const std::string& name) {
  for (const MethodFacts& method : payload.methods)
    if (method.name == name) return;
  throw LoadError(Kind::option, "weight_offload_budget:" + name + " names no delegate; the program has " +
                                  joined(payload.methods, [](const MethodFacts& method) { return method.name; }));
}

// The GPU to run on, after checking that the program can run there.
int32_t device_index_of(const Payload& payload, const SessionRequest& request) {
  if (payload.device != "cuda") {
    if (request.device_index)
      throw LoadError(Kind::device, "weight_offload_device is " + std::to_string(*request.device_index) +
                                      ", and the program was compiled for " + payload.device + ", which has no number");
    return 0;
  }
  int32_t index = request.device_index ? *request.device_index : current_device_index();
  const Gpu gpu = describe_gpu(index);
  check_build(payload, &gpu, index);
  return index;
}

// The initial value of a state, if the data files have one: they take precedence. locate_weights() refused a program
// whose files lack one that it needs.
std::vector<char> first_value(const NamedDataMap& data, const StateFacts& state) {
  auto found = data.get_data(state.name);
  if (!found.ok()) return {};
  std::vector<char> value(static_cast<const char*>(found->data()), static_cast<const char*>(found->data()) + found->size());
  found->Free();
  WeightFacts as_weight{};
  as_weight.bytes = state.bytes;
  if (is_packed_entry(as_weight, value.data(), value.size()))
    throw LoadError(Kind::weight_mismatch, "state '" + state.name + "' is packed in the data file, and a process "
                                             "without Python unpacks weights only; pack the weights again: penstock "
                                             "unpack, and then penstock pack --program with the .pte");
  if ((int64_t)value.size() != state.bytes)
    throw LoadError(Kind::weight_mismatch, "state '" + state.name + "' has " + std::to_string(value.size()) +
                                             " bytes in the data file, the program needs " +
                                             std::to_string(state.bytes));
  return value;
}

std::unique_ptr<Delegate> load(const BackendInitContext& context, const FreeableBuffer& processed) {
  SessionRequest request = read_options(context);
  DelegateRef delegate_ref = read_delegate_ref(processed.data(), processed.size());
  const NamedDataMap* data = context.get_named_data_map();
  if (!data) throw LoadError(Kind::missing_weight, "the program was loaded without any data: give its .ptd");
  auto bytes = data->get_data(delegate_ref.payload);
  if (!bytes.ok()) throw LoadError(Kind::package, "the .pte holds no " + delegate_ref.payload + ", which its delegate names");
  Payload payload = read_payload(bytes->data(), bytes->size());
  payload.shown = Mappings().file_name(bytes->data(), payload.program);
  if (delegate_ref.number < 0 || (size_t)delegate_ref.number >= payload.methods.size() ||
      payload.methods[(size_t)delegate_ref.number].name != delegate_ref.method)
    throw LoadError(Kind::package, "the program has no method " + std::to_string(delegate_ref.number) + " of name '" +
                                     delegate_ref.method + "', which its delegate names");
  check_program(payload);
  check_graphs(payload, request);
  for (const auto& [name, budget] : request.own_budgets) check_delegate(payload, name);
  // Each of them names another delegate.
  if (request.budget.is_given() && request.own_budgets.size() == payload.methods.size())
    throw LoadError(Kind::budget, "a budget for the program was given, but every delegate has one of its own");
  auto delegate = std::make_unique<Delegate>();
  delegate->method = payload.methods[(size_t)delegate_ref.number];
  delegate->device = payload.device;
  delegate->session = sessions().take_shared(request.group, delegate_ref.number);
  const bool has_state = !delegate->method.states.empty();
  if (delegate->session) {
    if (has_state) delegate->state = states().take_shared(request.group, delegate_ref.number);
    if (has_state && !delegate->state) throw LoadError(Kind::package, "no state was made for the delegates of the program");
  } else if (sessions().is_shared(request.group)) {
    throw LoadError(Kind::package, "no session was made for delegate " + std::to_string(delegate_ref.number) +
                                     " of the program");
  } else {
    int32_t index = device_index_of(payload, request);
    WeightsPlace weights = locate_weights(*data, payload);
    // State comes before the budget is chosen, so that memory counted as free no longer includes it. Also for a
    // delegate that has none: those with state may be loaded later, into the same session.
    if (!payload.states.empty())
      delegate->state = states().take(
          {payload.program, weights.device, weights.inode, request.group, index}, delegate_ref.number, 0, [&] {
            return std::make_shared<StateTable>(
                payload.states, [&](const StateFacts& state) { return first_value(*data, state); }, payload.device, index);
          });
    delegate->session = take_session(payload, delegate_ref.number, weights, request, index);
    for (const std::string& line : (*delegate->session)->take_news()) log_line(kInfo, line);
  }
  ProgramSession& session = **delegate->session;
  if (request.cuda_graph) delegate->graph_memory = graph_memory_of(session.handle(), session.device_index());
  delegate->transfers =
      std::make_unique<TransferMemory>(session.handle(), delegate->method.transfer_bytes, delegate->method.name);
  delegate->code = std::make_unique<CompiledCode>(payload.code, payload.code_bytes, payload.program, delegate_ref.method,
                                                  payload.device, session.device_index());
  if (delegate->graph_memory)
    delegate->replays = std::make_unique<Replays>(session.handle(), session.running(), session.plan_memory(),
                                                  delegate->session->number(), *delegate->code, *delegate->graph_memory,
                                                  delegate->method.name);
  bytes->Free();
  return delegate;
}

// ------------------------------------------------------------------------------------------------------------ running

TensorView view_of(const Tensor& tensor) {
  return {tensor.mutable_data_ptr(),
          (int64_t)tensor.scalar_type(),
          {tensor.sizes().begin(), tensor.sizes().end()},
          {tensor.strides().begin(), tensor.strides().end()}};
}

std::vector<int64_t> strides_of(const std::vector<int64_t>& sizes, const std::vector<int64_t>& dim_order) {
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    auto dim = (size_t)dim_order[i];
    strides[dim] = step;
    step *= std::max<int64_t>(sizes[dim], 1);
  }
  return strides;
}

[[noreturn]] void refuse_input(const InputFacts& facts, const std::string& what) {
  throw LoadError(Kind::input, "input '" + facts.name + "' " + what);
}

// The record has no names for dynamic sizes.
std::string needed_text(const std::vector<int64_t>& shape) {
  return "[" + joined(shape, [](int64_t size) {
           if (size < 0) return std::string("any");
           return std::to_string(size);
         }) + "]";
}

// In the words of runtime/inputs.py and runtime/symbolic_layout.py.
void check_layout(const InputFacts& facts, const TensorView& view) {
  if (view.scalar_type != facts.scalar_type)
    refuse_input(facts, "has dtype " + dtype_text(view.scalar_type) + ", needs " + dtype_text(facts.scalar_type));
  const std::string found = listed(view.sizes), needed = needed_text(facts.shape);
  if (view.sizes.size() != facts.shape.size())
    refuse_input(facts, "has " + std::to_string(view.sizes.size()) + " dimensions, shape " + found + "; needs " +
                          std::to_string(facts.shape.size()) + ", shape " + needed);
  for (size_t d = 0; d < facts.shape.size(); ++d)
    if (facts.shape[d] >= 0 && facts.shape[d] != view.sizes[d])
      refuse_input(facts, "has shape " + found + ", needs " + needed + ": dimension " + std::to_string(d) + " is " +
                            std::to_string(view.sizes[d]) + ", needs " + std::to_string(facts.shape[d]));
}

// Compiled code checks nothing.
void check_input(const Delegate& delegate, size_t index, const TensorView& view) {
  const InputFacts& facts = delegate.method.inputs[index];
  if (facts.dim_order.size() != facts.shape.size())
    throw LoadError(Kind::package, "input '" + facts.name + "' of " + delegate.method.name + " has a dim order of " +
                                     std::to_string(facts.dim_order.size()) + " dimensions and a shape of " +
                                     std::to_string(facts.shape.size()));
  try {
    check_layout(facts, view);
    check_indices(facts, view);
  } catch (const LoadError& refusal) {
    throw LoadError(refusal.kind, "method '" + delegate.method.name + "': " + refusal.what());
  }
}

void compute(Delegate& delegate, void* stream) {
  delegate.code->move_inputs();
  void* session = (*delegate.session)->handle();
  if (core().session_begin(session, delegate.session->number(), stream)) throw_core_failure();
  try {
    delegate.code->run(stream);
  } catch (const std::exception& error) {
    give_run_up(session, delegate.method.name, error);
  }
  if (core().session_end(session)) throw_core_failure();
}

// Copies the run's outputs into the arguments that follow its inputs.
void return_outputs(Delegate& delegate, Span<EValue*> args) {
  const size_t inputs = delegate.method.inputs.size();
  const size_t outputs = (size_t)delegate.method.outputs;
  if (delegate.code->output_count() != outputs)
    throw LoadError(Kind::package, delegate.method.name + " returned " + std::to_string(delegate.code->output_count()) +
                                     " tensors, its record lists " + std::to_string(outputs));
  std::vector<TensorView> results;
  for (size_t i = 0; i < outputs; ++i) {
    Tensor to = args[inputs + i]->toTensor();
    std::vector<int64_t> found = delegate.code->output_sizes(i);
    std::vector<SizesType> sizes(found.begin(), found.end());
    if (executorch::runtime::resize_tensor(to, {sizes.data(), sizes.size()}) != Error::Ok)
      throw LoadError(Kind::package, "output " + std::to_string(i) + " of " + delegate.method.name + " has shape " +
                                       listed(found) + ", for which ExecuTorch planned no room");
    TensorView view = view_of(to);
    if (view.scalar_type != delegate.code->output_scalar_type(i))
      throw LoadError(Kind::package, "output " + std::to_string(i) + " of " + delegate.method.name +
                                       " is " + dtype_text(delegate.code->output_scalar_type(i)) +
                                       ", ExecuTorch expects " + dtype_text(view.scalar_type));
    results.push_back(std::move(view));
  }
  delegate.code->copy_outputs(results, *delegate.transfers);
}

void execute_delegate(Delegate& delegate, Span<EValue*> args) {
  size_t inputs = delegate.method.inputs.size();
  size_t outputs = (size_t)delegate.method.outputs;
  if (args.size() != inputs + outputs)
    throw LoadError(Kind::package, delegate.method.name + " was called with " + std::to_string(args.size()) +
                                     " values, it has " + std::to_string(inputs) + " inputs and " +
                                     std::to_string(outputs) + " outputs");
  for (size_t i = 0; i < args.size(); ++i)
    if (!args[i]->isTensor())
      throw LoadError(Kind::input, "value " + std::to_string(i) + " of " + delegate.method.name + " is no tensor");
  std::vector<TensorView> views;
  std::vector<std::vector<int64_t>> strides;
  for (size_t i = 0; i < inputs; ++i) {
    views.push_back(view_of(args[i]->toTensor()));
    check_input(delegate, i, views.back());
    strides.push_back(strides_of(views.back().sizes, delegate.method.inputs[i].dim_order));
  }
  ProgramSession& session = **delegate.session;
  const ProgramSession::Run alone(session);
  StateTable* state = delegate.method.states.empty() ? nullptr : &**delegate.state;
  std::unique_lock<std::mutex> alone_with_state;
  if (state) {
    alone_with_state = std::unique_lock<std::mutex>(state->running());
    state->require_valid();
  }
  struct Forgets {
    CompiledCode& code;
    ~Forgets() { code.forget(); }
  } forgets{*delegate.code};
  if (state) delegate.code->take_states(state->tensors(), delegate.method.states);
  delegate.transfers->rewind();
  delegate.code->take_inputs(views, strides, *delegate.transfers);
  try {
    void* stream = current_stream(delegate.device, session.device_index());
    // A trace tells steps apart, and a graph is one piece.
    Replays* replays = session.is_tracing() ? nullptr : delegate.replays.get();
    Shapes shapes;
    for (const TensorView& view : views) shapes.push_back(view.sizes);
    if (!replays || !replays->replay(shapes, stream)) {
      compute(delegate, stream);
      if (replays) replays->capture(shapes);
    }
    // The work that this waits for may fail as well, and then nobody knows how far the run came.
    return_outputs(delegate, args);
  } catch (const std::exception& error) {
    if (state) state->mark_invalid(delegate.method.name, error.what());
    throw;
  }
}

class PenstockBackend final : public executorch::runtime::BackendInterface {
 public:
  bool is_available() const override { return true; }

  Result<DelegateHandle*> init(BackendInitContext& context, FreeableBuffer* processed,
                               ArrayRef<CompileSpec>) const override {
    std::unique_ptr<Delegate> delegate;
    Error error = to_status([&] { delegate = load(context, *processed); });
    if (error != Error::Ok) return error;
    processed->Free();
    return static_cast<DelegateHandle*>(delegate.release());
  }

  Error execute(BackendExecutionContext&, DelegateHandle* handle, Span<EValue*> args) const override {
    return to_status([&] { execute_delegate(*static_cast<Delegate*>(handle), args); });
  }

  Error set_option(BackendOptionContext&, const Span<BackendOption>& options) override {
    return to_status([&] {
      for (const std::string& line : set_loaded_options(options)) log_line(kInfo, line);
    });
  }

  Error get_option(BackendOptionContext&, Span<BackendOption>& options) override {
    return to_status([&] { get_loaded_options(options); });
  }

  void destroy(DelegateHandle* handle) const override { delete static_cast<Delegate*>(handle); }
};

PenstockBackend backend;
const Error registered = executorch::runtime::register_backend({kBackendName, &backend});

}  // namespace
}  // namespace penstock_executorch

// 0 if ExecuTorch's runtime took the backend.
extern "C" int32_t penstock_executorch_registered() { return (int32_t)penstock_executorch::registered; }
