// What the CPU does in the place of the kernels of experts, call by call: a session reaches groups only through torch.
#include "experts/expert_calls.h"
#include "status.h"

using namespace penstock;

extern "C" {

int64_t penstock_test_table_bytes(int32_t experts, int32_t slots) { return table_layout(experts, slots).bytes; }

int32_t penstock_test_choose_experts(const ChooseCall* call) {
  return to_status([&] { choose_experts(*call); });
}

int32_t penstock_test_move_experts(const MoveCall* call) {
  return to_status([&] { move_experts(*call); });
}

}  // extern "C"
