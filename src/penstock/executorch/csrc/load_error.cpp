#include "load_error.h"

#include <cstdio>

namespace penstock_executorch {

LastRefusal& last_refusal() {
  static thread_local LastRefusal last;
  return last;
}

std::string format_bytes(int64_t bytes) {
  if (bytes < 0) return "-" + format_bytes(-bytes);
  if (bytes < 1024) return std::to_string(bytes) + " B";
  const char* units[] = {"KiB", "MiB", "GiB", "TiB"};
  long double unit = 1024;
  int which = 0;
  while (which < 3 && (long double)bytes / unit >= 1023.995L) {
    unit *= 1024;
    ++which;
  }
  auto hundredths = (int64_t)((long double)bytes * 100 / unit + 0.5L);
  char text[64];
  std::snprintf(text, sizeof text, "%lld.%02lld", (long long)(hundredths / 100), (long long)(hundredths % 100));
  std::string number = text;
  while (number.back() == '0') number.pop_back();
  if (number.back() == '.') number.pop_back();
  bool exact = (long double)hundredths * unit == (long double)bytes * 100;
  return number + " " + units[which] + (exact ? "" : " (" + std::to_string(bytes) + " bytes)");
}

std::string listed(const std::vector<int64_t>& numbers) {
  std::string out = "[";
  for (size_t i = 0; i < numbers.size(); ++i) out += (i ? ", " : "") + std::to_string(numbers[i]);
  return out + "]";
}

}  // namespace penstock_executorch
