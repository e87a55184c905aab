// What was refused last on each thread.
#include "load_error.h"

#include <new>

namespace penstock_executorch {

LastRefusal& last_refusal() {
  static thread_local LastRefusal last;
  return last;
}

const LastRefusal& keep_refusal() {
  LastRefusal& last = last_refusal();
  try {
    throw;
  } catch (const LoadError& refusal) {
    last = {refusal.kind, refusal.detail, refusal.what()};
  } catch (const std::bad_alloc&) {
    last = {Kind::core, (int64_t)Failure::host_memory, "the host has no memory left"};
  } catch (const std::exception& error) {
    last = {Kind::code, 0, error.what()};
  }
  return last;
}

std::string listed(const std::vector<int64_t>& numbers) {
  std::string out = "[";
  for (size_t i = 0; i < numbers.size(); ++i) out += (i ? ", " : "") + std::to_string(numbers[i]);
  return out + "]";
}

}  // namespace penstock_executorch
