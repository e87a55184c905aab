// Amounts of bytes as text for people.
#pragma once

#include <cstdint>
#include <string>

namespace penstock {

// '1.5 GiB' where that is exact, '2.07 GiB (2218786816 bytes)' where it is not.
std::string format_bytes(int64_t bytes);

}  // namespace penstock
