// Reads the record of what delegates share, to the last number.
#include "description.h"

#include <algorithm>
#include <map>

#include "load_error.h"
#include "penstock_records.h"

namespace penstock_executorch {
namespace {

using penstock::RecordReader;

// More bytes than any machine has, and so few that sums of such amounts never overflow.
constexpr int64_t kMostBytes = (int64_t{1} << 56) + 1;
constexpr int64_t kMostPageBytes = (int64_t{1} << 30) + 1;

[[noreturn]] void refuse(const std::string& text) { throw LoadError(Kind::package, text); }

std::vector<int64_t> sizes(RecordReader& in) { return in.integers(0, INT64_MAX); }

int64_t amount(RecordReader& in) { return in.next(0, kMostBytes); }

std::optional<int64_t> optional_amount(RecordReader& in) {
  if (!in.next(0, 2)) return std::nullopt;
  return amount(in);
}

WeightFacts read_weight(RecordReader& in) {
  WeightFacts weight{};
  for (size_t names = in.length(); names > 0; --names) weight.names.push_back(in.text());
  if (weight.names.empty()) refuse("a weight of the program has no name");
  weight.name = weight.names.front();
  weight.scalar_type = in.next(0, INT8_MAX);
  weight.shape = sizes(in);
  weight.dim_order = sizes(in);
  weight.bytes = amount(in);
  return weight;
}

// Each dimension once: strides are written where the order says.
void check_order(const std::vector<int64_t>& dim_order, const std::string& whose) {
  std::vector<int64_t> dims = dim_order;
  std::sort(dims.begin(), dims.end());
  for (size_t i = 0; i < dims.size(); ++i)
    if (dims[i] != (int64_t)i) refuse(whose + " has dim order " + listed(dim_order));
}

// Checks the layout, which compiled code takes for granted.
StateFacts read_state(RecordReader& in) {
  StateFacts state{in.text(), in.next(0, INT8_MAX), sizes(in), sizes(in), amount(in), in.next(0, 2) != 0};
  check_order(state.dim_order, "state '" + state.name + "'");
  if (state.dim_order.size() != state.shape.size())
    refuse("state '" + state.name + "' has a shape of other dimensions than its order");
  return state;
}

IndexFacts read_index(RecordReader& in) {
  IndexFacts index{in.next(), in.next(), in.text(), in.next(0, INT64_MAX), in.next(0, INT64_MAX), {}};
  for (size_t dims = in.length(3); dims > 0; --dims) index.region.push_back({in.next(), in.next(), in.next(1, INT64_MAX)});
  return index;
}

InputFacts read_input(RecordReader& in) {
  InputFacts input{in.text(), in.next(0, INT8_MAX), in.integers(-1, INT64_MAX), sizes(in), {}};
  check_order(input.dim_order, "input '" + input.name + "'");
  for (size_t indexes = in.length(6); indexes > 0; --indexes) {
    input.indexes.push_back(read_index(in));
    const size_t dims = input.indexes.back().region.size();
    if (input.scalar_type >= kWholeNumberTypes || (dims && dims != input.shape.size()))
      refuse("input '" + input.name + "' indexes a table, and is of scalar type " + std::to_string(input.scalar_type) +
             ", or has other dimensions than what is said of it");
  }
  return input;
}

MethodFacts read_method(RecordReader& in, size_t states) {
  MethodFacts method{in.text(), in.integers(0, (int64_t)states), {}, 0, 0};
  for (size_t inputs = in.length(5); inputs > 0; --inputs) method.inputs.push_back(read_input(in));
  method.outputs = in.next(0, INT32_MAX);
  method.transfer_bytes = amount(in);
  return method;
}

PlanTable read_plan_table(RecordReader& in, size_t methods, size_t weights) {
  PlanTable table{in.integers(0, (int64_t)methods), in.integers(0, (int64_t)weights), amount(in),
                  amount(in), amount(in), {}};
  for (size_t plans = in.length(4); plans > 0; --plans)
    table.plans.push_back(
        {amount(in), in.next(0, 2) != 0, (size_t)in.next(0, INT64_MAX / (int64_t)sizeof(int64_t)), (uint64_t)in.next()});
  if (table.plans.empty()) refuse("the program holds no plan");
  return table;
}

void read_built_with(RecordReader& in, Description& out) {
  std::map<std::string, std::string> said;
  for (size_t i = in.length(2); i > 0; --i) {
    std::string name = in.text();
    if (!said.emplace(name, in.text()).second) refuse("the program says twice which " + name + " it was built with");
  }
  auto take = [&](const char* name, std::string& value) {
    auto found = said.find(name);
    if (found == said.end()) refuse(std::string("the program does not say which ") + name + " it was built with");
    value = found->second;
  };
  take("torch", out.torch);
  take("machine", out.machine);
  take("cpu", out.cpu);
  if (out.device != "cuda") return;
  take("capability", out.capability);
  take("gpu", out.gpu);
}

Description read_parts(RecordReader& in) {
  Description out{};
  out.program = in.text();
  out.device = in.text();
  out.page_bytes = in.next(1, kMostPageBytes);
  out.baked_bytes = optional_amount(in);
  out.activation_bytes = optional_amount(in);
  read_built_with(in, out);
  for (size_t i = in.length(5); i > 0; --i) out.weights.push_back(read_weight(in));
  for (size_t i = in.length(6); i > 0; --i) out.states.push_back(read_state(in));
  for (size_t i = in.length(5); i > 0; --i) out.methods.push_back(read_method(in, out.states.size()));
  out.plan_tables = read_plan_tables(in, out.methods.size(), out.weights.size());
  in.finish();
  if (out.methods.empty() || out.plan_tables.empty())
    refuse("the program has " + std::to_string(out.plan_tables.size()) + " plan tables and " +
           std::to_string(out.methods.size()) + " methods, needs one of each");
  return out;
}

}  // namespace

std::vector<PlanTable> read_plan_tables(RecordReader& in, size_t methods, size_t weights) {
  std::vector<PlanTable> tables;
  for (size_t i = in.length(6); i > 0; --i) tables.push_back(read_plan_table(in, methods, weights));
  return tables;
}

Description read_description(const void* record, size_t bytes) {
  if (bytes % sizeof(int64_t)) refuse("the program's record has " + std::to_string(bytes) + " bytes, no whole numbers");
  try {
    RecordReader in(record, bytes / sizeof(int64_t), "the program");
    return read_parts(in);
  } catch (const penstock::RecordError& error) {
    refuse(error.what());
  }
}

}  // namespace penstock_executorch
