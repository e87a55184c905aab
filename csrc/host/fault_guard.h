// Reading a mapped file that somebody has truncated raises SIGBUS. A guarded copy turns that into a return value; any
// other SIGBUS goes to whoever handled it before, after one line on stderr that names the weights file it fell into.
#pragma once

#include <cstddef>

namespace penstock {

// memcpy. False when `from` lies in a mapping whose file no longer has those bytes.
bool guarded_copy(void* to, const void* from, size_t bytes) noexcept;

// Reads one byte of every page. False as above.
bool guarded_touch(const void* start, size_t bytes) noexcept;

// A mapping that a stray fault is to be told by its path. The ticket is handed back to forget_mapping before unmapping;
// it is -1 when the table is full, and a fault there is then told by its address alone.
int remember_mapping(const void* start, size_t bytes, const char* path) noexcept;
void forget_mapping(int ticket) noexcept;

}  // namespace penstock
