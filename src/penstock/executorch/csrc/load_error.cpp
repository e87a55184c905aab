#include "load_error.h"

namespace penstock_executorch {

LastRefusal& last_refusal() {
  static thread_local LastRefusal last;
  return last;
}

std::string listed(const std::vector<int64_t>& numbers) {
  std::string out = "[";
  for (size_t i = 0; i < numbers.size(); ++i) out += (i ? ", " : "") + std::to_string(numbers[i]);
  return out + "]";
}

}  // namespace penstock_executorch
