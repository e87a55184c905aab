// Amounts of bytes as people write them, and back.
#pragma once

#include <cstdint>
#include <string>

namespace penstock {

// '1.5 GiB' where that is exact, '2.07 GiB (2218786816 bytes)' where it is not.
std::string format_bytes(int64_t bytes);

// The number of bytes that '8589934592', '8GiB' or '2.3 GiB' stands for, cut off to a whole one. Throws
// CoreError(budget) for anything that is not clearly one.
int64_t parse_bytes(const std::string& text);

}  // namespace penstock
