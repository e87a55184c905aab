// Reads the limits of the machine and of its cgroups, and counts what this process has pinned.
#include "open/host_limit.h"

#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <utility>
#include <vector>

#include "driver/driver.h"
#include "open/amounts.h"

namespace penstock {
namespace {

namespace fs = std::filesystem;

// The names that the two versions of cgroups have for the same things.
struct CgroupFiles {
  // More than one may limit: above memory.high nothing is killed, but with pinned pages everything crawls.
  std::vector<const char*> limits;
  const char* usage;
  std::vector<std::string> cache_fields;
};

const CgroupFiles kVersion2{{"memory.max", "memory.high"}, "memory.current", {"inactive_file", "active_file"}};
const CgroupFiles kVersion1{{"memory.limit_in_bytes"}, "memory.usage_in_bytes", {"total_inactive_file", "total_active_file"}};

[[noreturn]] void cannot_tell(const std::string& why) {
  throw CoreError(Failure::host_memory, "how much host memory is available cannot be told: " + why);
}

// Empty when there is no such file: the root cgroup of a machine has no limits.
std::string content_of(const fs::path& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  std::string found = text.str();
  while (!found.empty() && (found.back() == '\n' || found.back() == ' ')) found.pop_back();
  return found;
}

int64_t number_of(const std::string& text, const fs::path& path) {
  size_t end = 0;
  try {
    const unsigned long long value = std::stoull(text, &end);
    if (end == text.size()) return (int64_t)std::min<unsigned long long>(value, INT64_MAX);
  } catch (const std::exception&) {
    // Reported below, like any other text that is no number.
  }
  cannot_tell(path.string() + " says '" + text + "', which is no number");
}

HostLimit machine_limit(const fs::path& root, int64_t pinned) {
  const fs::path path = root / "proc/meminfo";
  std::ifstream file(path);
  if (!file) cannot_tell(path.string() + ": " + std::strerror(errno));
  for (std::string name, value, unit; file >> name >> value;) {
    std::getline(file, unit);
    if (name != "MemAvailable:") continue;
    const int64_t available = number_of(value, path) * 1024;
    return {std::max<int64_t>(0, available - pinned),
            "MemAvailable in " + path.string() + " (" + std::to_string(available) + " bytes)"};
  }
  cannot_tell(path.string() + " has no line MemAvailable");
}

struct Cgroup {
  fs::path folder;
  const CgroupFiles* files;
};

bool has_memory(const std::string& controllers) {
  std::istringstream each(controllers);
  for (std::string name; std::getline(each, name, ',');)
    if (name == "memory") return true;
  return false;
}

// Every cgroup folder above this process, its own first; a limit of any of them applies.
std::vector<Cgroup> cgroups(const fs::path& root) {
  std::vector<Cgroup> found;
  std::ifstream table(root / "proc/self/cgroup");
  for (std::string line; std::getline(table, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string number = line.substr(0, first), controllers = line.substr(first + 1, second - first - 1);
    const bool is_version_2 = number == "0" && controllers.empty();
    if (!is_version_2 && !has_memory(controllers)) continue;
    const fs::path mount = root / "sys/fs/cgroup";
    const fs::path base = is_version_2 ? mount : mount / "memory";
    // In a container the path may be the host's, and only the mount point itself is visible.
    for (fs::path step = fs::path("/" + line.substr(second + 1)).lexically_normal().relative_path();;
         step = step.parent_path()) {
      const fs::path folder = step.empty() ? base : base / step;
      if (fs::is_directory(folder)) found.push_back({folder, is_version_2 ? &kVersion2 : &kVersion1});
      if (step.empty()) break;
    }
  }
  return found;
}

std::optional<HostLimit> cgroup_limit(const Cgroup& group, int64_t pinned) {
  int64_t limit = INT64_MAX;
  fs::path from;
  for (const char* name : group.files->limits) {
    const fs::path path = group.folder / name;
    const std::string text = content_of(path);
    if (text.empty() || text == "max") continue;
    const int64_t value = number_of(text, path);
    if (from.empty() || value < limit) limit = value, from = path;
  }
  const std::string usage = content_of(group.folder / group.files->usage);
  if (from.empty() || usage.empty()) return std::nullopt;
  int64_t cache = 0;
  std::istringstream fields(content_of(group.folder / "memory.stat"));
  for (std::string name, value; fields >> name >> value;)
    if (std::count(group.files->cache_fields.begin(), group.files->cache_fields.end(), name))
      cache += number_of(value, group.folder / "memory.stat");
  const int64_t used = number_of(usage, group.folder / group.files->usage);
  const int64_t kept = std::max<int64_t>(0, used - std::max<int64_t>(0, cache - pinned));
  return HostLimit{std::max<int64_t>(0, limit - kept),
                   from.string() + " (" + std::to_string(limit) + " bytes, of which " + std::to_string(kept) +
                       " are in use and cannot be reclaimed)"};
}

// Whether the file system keeps its files in memory. Pinning their pages then brings nothing in.
bool is_memory_file(dev_t device, const fs::path& root) {
  std::ifstream table(root / "proc/self/mountinfo");
  const std::string name = std::to_string(major(device)) + ":" + std::to_string(minor(device));
  for (std::string line; std::getline(table, line);) {
    std::istringstream fields(line);
    std::string id, parent, numbers, field, kind;
    fields >> id >> parent >> numbers;
    if (numbers != name) continue;
    while (fields >> field && field != "-") {
    }
    fields >> kind;
    return kind == "tmpfs" || kind == "ramfs" || kind == "hugetlbfs";
  }
  return false;
}

struct stat status_of(const std::string& path) {
  struct stat status;
  if (stat(path.c_str(), &status))
    throw CoreError(Failure::host_read, "the weights file " + path + " cannot be read: " + std::strerror(errno));
  return status;
}

// What this process has been promised, and how much of that the machine does not yet report as in use.
struct Promises {
  struct File {
    int64_t count = 0;
    // Taken from the file cache once the file has come (pinned), until then from what is available (coming).
    int64_t pinned_bytes = 0;
    int64_t coming_bytes = 0;
    bool has_come = false;
  };
  // Held while a promise is checked and made, which takes as long as reading a few small files.
  std::mutex lock;
  std::map<std::pair<dev_t, ino_t>, File> files;
  int64_t rest_bytes = 0;

  int64_t pinned_bytes() const {
    int64_t total = 0;
    for (const auto& [key, file] : files) total += file.has_come ? file.pinned_bytes : 0;
    return total;
  }
  int64_t coming_bytes() const {
    int64_t total = rest_bytes;
    for (const auto& [key, file] : files) total += file.has_come ? 0 : file.coming_bytes;
    return total;
  }
  int64_t bytes_to_pin(const struct stat& status, const std::string& root) const {
    if (files.count({status.st_dev, status.st_ino})) return 0;
    if (is_memory_file(status.st_dev, root)) return std::max<int64_t>(0, (int64_t)status.st_size - status.st_blocks * 512);
    return (int64_t)status.st_size;
  }
  void require(int64_t needed_bytes, const std::string& purpose, const std::string& root) const {
    HostLimit limit = host_limit(root, pinned_bytes());
    if (const int64_t coming = coming_bytes()) {
      limit.available_bytes = std::max<int64_t>(0, limit.available_bytes - coming);
      limit.source += ", less " + std::to_string(coming) + " bytes for what is being loaded";
    }
    if (needed_bytes <= limit.available_bytes) return;
    const std::string available = std::to_string(limit.available_bytes);
    throw CoreError(Failure::host_memory, std::to_string(needed_bytes) + " bytes of host memory are needed for " +
                                            purpose + ", and " + available + " are available by " + limit.source +
                                            "; give a cap of host memory of at most " + available +
                                            " bytes, or raise the limit");
  }
};

// Never destroyed: sessions may outlive static objects.
Promises& promises() {
  static Promises* made = new Promises;
  return *made;
}

}  // namespace

HostLimit host_limit(const std::string& root, int64_t pinned) {
  HostLimit least = machine_limit(root, pinned);
  for (const Cgroup& group : cgroups(root))
    if (auto limit = cgroup_limit(group, pinned); limit && limit->available_bytes < least.available_bytes)
      least = *limit;
  return least;
}

HostShare::HostShare(int64_t bytes, const std::string& purpose, const std::string& root) {
  std::lock_guard<std::mutex> hold(promises().lock);
  promises().require(bytes, purpose, root);
  promises().rest_bytes += bytes;
  promised_bytes_ = bytes;
}

std::unique_ptr<HostShare> HostShare::of_file(const std::string& path, int64_t extra_bytes, const std::string& root) {
  const struct stat status = status_of(path);
  std::unique_ptr<HostShare> made(new HostShare);
  std::lock_guard<std::mutex> hold(promises().lock);
  const int64_t bytes = promises().bytes_to_pin(status, root);
  promises().require(sum_of(bytes, extra_bytes), path + ", all of which is held in memory", root);
  Promises::File& file = promises().files[{status.st_dev, status.st_ino}];
  if (!file.count++) {
    file.coming_bytes = bytes;
    // A file on a memory file system is no file cache, and was never counted as available.
    file.pinned_bytes = is_memory_file(status.st_dev, root) ? 0 : (int64_t)status.st_size;
  }
  promises().rest_bytes += extra_bytes;
  made->file_ = {status.st_dev, status.st_ino};
  made->promised_bytes_ = extra_bytes;
  return made;
}

HostShare::~HostShare() {
  rest_is_allocated();
  if (!file_) return;
  std::lock_guard<std::mutex> hold(promises().lock);
  auto found = promises().files.find(*file_);
  if (--found->second.count == 0) promises().files.erase(found);
}

void HostShare::file_has_come() {
  std::lock_guard<std::mutex> hold(promises().lock);
  promises().files.at(*file_).has_come = true;
}

void HostShare::rest_is_allocated() {
  std::lock_guard<std::mutex> hold(promises().lock);
  promises().rest_bytes -= std::exchange(promised_bytes_, 0);
}

int64_t pinned_bytes() {
  std::lock_guard<std::mutex> hold(promises().lock);
  return promises().pinned_bytes();
}

int64_t bytes_to_pin(const std::string& path, const std::string& root) {
  const struct stat status = status_of(path);
  std::lock_guard<std::mutex> hold(promises().lock);
  return promises().bytes_to_pin(status, root);
}

}  // namespace penstock
