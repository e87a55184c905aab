// Registers the mapping chunk by chunk, all or none, and unregisters it.
#include "host/registration.h"

#include <string>

#include "driver/cleanup.h"

namespace penstock {
namespace {

std::string ends_problem(const HostFile& file, const std::vector<size_t>& ends) {
  size_t page = host_page_bytes();
  size_t whole = (file.bytes() + page - 1) / page * page;
  size_t before = 0;
  for (size_t end : ends) {
    if (end % page)
      return "chunk end " + std::to_string(end) + " is not a multiple of the page, " + std::to_string(page);
    if (end <= before) return "chunk end " + std::to_string(end) + " does not lie after " + std::to_string(before);
    before = end;
  }
  if (before == whole) return "";
  return "the chunks end at " + std::to_string(before) + ", and the file, in whole pages, at " + std::to_string(whole);
}

}  // namespace

Registration::Registration(Driver& driver, const HostFile& file, const std::vector<size_t>& ends) : driver_(driver) {
  std::string problem = ends_problem(file, ends);
  if (!problem.empty())
    throw CoreError(Failure::usage, "weights file " + file.path() + " cannot be registered: " + problem);
  starts_.reserve(ends.size());
  Entered entered(driver_);
  size_t start = 0;
  for (size_t end : ends) {
    try {
      driver_.register_host(file.data() + start, end - start);
    } catch (const CoreError& error) {
      size_t chunk = starts_.size() + 1;
      release();
      throw CoreError(error.failure == Failure::sticky ? Failure::sticky : Failure::registration,
                      "weights file " + file.path() + " (" + std::to_string(file.bytes()) +
                          " bytes) could not be registered with the device: chunk " + std::to_string(chunk) + " of " +
                          std::to_string(ends.size()) + ", bytes " + std::to_string(start) + " to " +
                          std::to_string(end) + ": " + error.what() +
                          "; a cap, as in host_memory=\"1GiB\", runs without registration; otherwise check the memory limit of "
                          "the container, `ulimit -l` and the driver's version");
    }
    starts_.push_back(file.data() + start);
    start = end;
  }
}

Registration::~Registration() { release(); }

void Registration::release() noexcept {
  // If the device cannot even be entered, it is gone, and with it everything that was registered.
  quietly([&] {
    Entered entered(driver_);
    while (!starts_.empty()) {
      quietly([&] { driver_.unregister_host(starts_.back()); });
      starts_.pop_back();
    }
  });
}

}  // namespace penstock
