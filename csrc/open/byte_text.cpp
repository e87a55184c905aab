// Writes and reads amounts of bytes exactly as src/penstock/budget.py does, to the digit and to the word.
#include "open/byte_text.h"

#include <algorithm>
#include <cstdio>
#include <optional>
#include <string_view>

#include "driver/driver.h"

namespace penstock {
namespace {

using Wide = unsigned __int128;

// Rounded half up, without a float: these digits are compared with what Python says.
uint64_t hundredths(uint64_t bytes, uint64_t unit_bytes) {
  return (uint64_t)(((Wide)bytes * 200 + unit_bytes) / ((Wide)unit_bytes * 2));
}

constexpr const char* kValidForms =
    "valid: a whole number of bytes (8589934592), or a number and a unit: KiB, MiB, GiB, TiB (powers of 1024) or B, "
    "KB, MB, GB, TB (powers of 1000), as in '8GiB', '2.3 GiB', '512MiB', '8 GB'";
// More digits than any amount has; Python has the same bound.
constexpr size_t kMostDigits = 40;

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_letter(char c) { return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z'); }

// In quotes, as Python shows a string that has no bytes beyond ASCII; those stay as they are.
std::string shown(std::string_view value) {
  const bool has_single = value.find('\'') != value.npos, has_double = value.find('"') != value.npos;
  const char quote = has_single && !has_double ? '"' : '\'';
  std::string text(1, quote);
  for (const char c : value) {
    const size_t named = std::string_view("\t\n\r").find(c);
    char code[8];
    std::snprintf(code, sizeof code, "\\x%02x", (unsigned)(unsigned char)c);
    if (c == quote || c == '\\') text += '\\';
    if (named != std::string_view::npos) text += std::string("\\") + "tnr"[named];
    else if ((unsigned char)c < 0x20 || c == 0x7f) text += code;
    else text += c;
  }
  text += quote;
  return text.size() <= 80 ? text : text.substr(0, 77) + "...";
}

// All upper and all lower case are understood. "Gb" and "Gib" are not: they read as bits.
std::optional<uint64_t> bytes_of_unit(std::string_view unit) {
  if (unit.empty() || unit == "B") return 1;
  if (unit == "kB") return 1000;
  uint64_t binary = 1, decimal = 1;
  for (const char prefix : {'K', 'M', 'G', 'T'}) {
    binary *= 1024;
    decimal *= 1000;
    const std::string upper(1, prefix), lower(1, (char)(prefix - 'A' + 'a'));
    if (unit == upper + "iB" || unit == upper + "IB" || unit == lower + "ib") return binary;
    if (unit == upper + "B" || unit == lower + "b") return decimal;
  }
  return std::nullopt;
}

// A number, blanks and letters, with nothing before, between or after them.
struct Amount {
  bool is_negative = false;
  std::string_view whole, fraction, unit;
};

std::optional<Amount> split(std::string_view text) {
  const auto take = [&](auto&& belongs) {
    const size_t count = (size_t)(std::find_if_not(text.begin(), text.end(), belongs) - text.begin());
    const std::string_view taken = text.substr(0, count);
    text.remove_prefix(count);
    return taken;
  };
  const auto is_blank = [](char c) { return c == ' ' || c == '\t'; };
  const auto fits = [](std::string_view digits) { return !digits.empty() && digits.size() <= kMostDigits; };
  Amount amount;
  amount.is_negative = !text.empty() && text[0] == '-';
  if (amount.is_negative) text.remove_prefix(1);
  amount.whole = take(is_digit);
  if (!fits(amount.whole)) return std::nullopt;
  if (!text.empty() && text[0] == '.') {
    text.remove_prefix(1);
    amount.fraction = take(is_digit);
    if (!fits(amount.fraction)) return std::nullopt;
  }
  take(is_blank);
  amount.unit = take(is_letter);
  if (!text.empty()) return std::nullopt;
  return amount;
}

[[noreturn]] void refuse(const std::string& text, const std::string& what) {
  throw CoreError(Failure::budget, shown(text) + what + "; " + kValidForms);
}

}  // namespace

int64_t parse_bytes(const std::string& text) {
  // What Python's strip() takes off, of ASCII.
  constexpr const char* kBlanks = " \t\n\v\f\r\x1c\x1d\x1e\x1f";
  const size_t first = text.find_first_not_of(kBlanks);
  const std::string stripped =
      first == std::string::npos ? "" : text.substr(first, text.find_last_not_of(kBlanks) - first + 1);
  const std::optional<Amount> amount = split(stripped);
  if (!amount) refuse(text, " is not a number of bytes");
  const std::optional<uint64_t> unit_bytes = bytes_of_unit(amount->unit);
  if (!unit_bytes) refuse(text, " has the unit " + shown(amount->unit) + ", which is unknown or ambiguous");
  if (*unit_bytes == 1 && amount->fraction.find_first_not_of('0') != std::string_view::npos)
    refuse(text, " is not a whole number of bytes");
  // From the last digit to the first: what is cut off below a digit cannot reach a whole byte above it.
  uint64_t bytes_of_fraction = 0;
  for (size_t i = amount->fraction.size(); i-- > 0;)
    bytes_of_fraction = ((uint64_t)(amount->fraction[i] - '0') * *unit_bytes + bytes_of_fraction) / 10;
  // So far over the largest amount that more digits make no difference, and far below the largest Wide.
  constexpr Wide kTooMany = (Wide)1 << 64;
  Wide number = 0;
  for (const char digit : amount->whole) number = std::min<Wide>(number * 10 + (Wide)(digit - '0'), kTooMany);
  const Wide bytes = number * *unit_bytes + bytes_of_fraction;
  if (amount->is_negative && bytes) refuse(text, " is negative");
  if (bytes > (Wide)INT64_MAX)
    refuse(text, " is more than " + std::to_string(INT64_MAX) + " bytes, the largest amount");
  return (int64_t)bytes;
}

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
