// Reading a mapped file that somebody has truncated raises SIGBUS. A guarded copy turns that into a return value; any
// other SIGBUS goes to whoever handled it before, after one line on stderr that names the weights file it fell into.
#pragma once

#include <cstddef>

namespace penstock {

// memcpy. False when `from` lies in a mapping whose file no longer has those bytes.
bool guarded_copy(void* to, const void* from, size_t bytes) noexcept;

// Reads one byte of every page. False as above.
bool guarded_touch(const void* start, size_t bytes) noexcept;

// Remembers a mapping, so that the report of a stray fault in it names its path. Give the ticket to forget_mapping
// before unmapping. It is -1 if the table is full; a fault there is then reported by its address alone.
int remember_mapping(const void* start, size_t bytes, const char* path) noexcept;
void forget_mapping(int ticket) noexcept;

}  // namespace penstock
