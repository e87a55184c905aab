// Reads /proc/self/maps.
#include "mapping.h"

#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <cstdio>
#include <fstream>

#include "load_error.h"

namespace penstock_executorch {
namespace {

bool is_there(const std::string& path, uint64_t inode) {
  struct stat status;
  return stat(path.c_str(), &status) == 0 && (uint64_t)status.st_ino == inode;
}

// The kernel writes a newline in a path as \012. It leaves backslashes alone, so the same text may also be literal.
std::string plain(const std::string& path) {
  std::string out;
  for (size_t at = 0; at < path.size(); ++at) {
    bool newline = path.compare(at, 4, "\\012") == 0;
    out += newline ? '\n' : path[at];
    if (newline) at += 3;
  }
  return out;
}

}  // namespace

Mappings::Mappings() {
  std::ifstream file("/proc/self/maps");
  for (std::string text; std::getline(file, text);) {
    unsigned long begin, end, offset, inode;
    unsigned major_number, minor_number;
    int path_at = 0;
    int found = std::sscanf(text.c_str(), "%lx-%lx %*s %lx %x:%x %lu %n", &begin, &end, &offset, &major_number,
                            &minor_number, &inode, &path_at);
    if (found < 6 || inode == 0) continue;
    uint64_t device = makedev(major_number, minor_number);
    lines_.push_back({begin, end, offset, device, inode, text.substr((size_t)path_at)});
  }
}

FilePlace Mappings::place(const void* address, const std::string& what) const {
  const Line* line = line_of(address);
  if (!line)
    throw LoadError(Kind::weights_file,
                  what + " is in memory, not in a mapped file, and only a file can be streamed from: load the .ptd with "
                         "Module::LoadMode::Mmap");
  std::string path = is_there(line->path, line->inode) ? line->path : plain(line->path);
  if (!is_there(path, line->inode))
    throw LoadError(Kind::weights_file,
                  "the weights file " + path + " was moved, replaced or removed while it was loaded");
  const auto offset_bytes = (int64_t)(line->offset + (reinterpret_cast<uintptr_t>(address) - line->begin));
  return {path, offset_bytes, line->device, line->inode};
}

std::string Mappings::file_name(const void* address, const std::string& otherwise) const {
  const Line* line = line_of(address);
  if (!line) return otherwise;
  const std::string path = plain(line->path);
  return path.substr(path.rfind('/') + 1);
}

const Mappings::Line* Mappings::line_of(const void* address) const {
  const auto at = reinterpret_cast<uintptr_t>(address);
  for (const Line& line : lines_)
    if (at >= line.begin && at < line.end && !line.path.empty() && line.path[0] == '/') return &line;
  return nullptr;
}

}  // namespace penstock_executorch
