// Writes an amount of bytes exactly as Python does, to the digit.
#include "open/byte_text.h"

#include <cstdio>

namespace penstock {
namespace {

using Wide = unsigned __int128;

// Rounded half up, without a float: these digits are compared with what Python says.
uint64_t hundredths(uint64_t bytes, uint64_t unit_bytes) {
  return (uint64_t)(((Wide)bytes * 200 + unit_bytes) / ((Wide)unit_bytes * 2));
}

}  // namespace

std::string format_bytes(int64_t bytes) {
  if (bytes < 0) return "-" + format_bytes(bytes == INT64_MIN ? INT64_MAX : -bytes);
  const auto count = (uint64_t)bytes;
  if (count < 1024) return std::to_string(count) + " B";
  const char* const units[] = {"KiB", "MiB", "GiB", "TiB"};
  uint64_t unit_bytes = 1024;
  size_t unit = 0;
  // The next unit is used as soon as two decimals would round to 1024 of this one.
  for (; unit < 3 && hundredths(count, unit_bytes) >= 102400; ++unit) unit_bytes *= 1024;
  const uint64_t found = hundredths(count, unit_bytes);
  char text[32];
  std::snprintf(text, sizeof text, "%llu.%02llu", (unsigned long long)(found / 100), (unsigned long long)(found % 100));
  std::string number = text;
  while (number.back() == '0') number.pop_back();
  if (number.back() == '.') number.pop_back();
  const bool is_exact = (Wide)found * unit_bytes == (Wide)count * 100;
  return number + " " + units[unit] + (is_exact ? "" : " (" + std::to_string(count) + " bytes)");
}

}  // namespace penstock
