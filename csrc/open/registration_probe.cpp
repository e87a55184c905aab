// Starts the probe, reads its output through a pipe, and kills it if it hangs.
#include "open/registration_probe.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <thread>

#include "driver/driver.h"
#include "probe/outcome.h"

extern char** environ;

namespace penstock {
namespace {

using Clock = std::chrono::steady_clock;

// How often the waiting caller is asked whether to go on.
constexpr int kTickMs = 20;
// A process that waits in the kernel survives even SIGKILL, so nobody may wait for it forever.
constexpr std::chrono::seconds kKillGrace{5};
// Only the end of a child's output is kept.
constexpr size_t kMostSaidBytes = 4096;

[[noreturn]] void refuse(const std::string& path, int32_t device_index, const std::string& problem) {
  throw CoreError(Failure::registration, "weights file " + path + " cannot be registered with device " +
                                           std::to_string(device_index) + ": " + problem +
                                           "; give a cap of host memory (host_memory=\"1GiB\", or "
                                           "weight_offload_host_memory_cap for a .pte), which needs no registration");
}

dev_t file_system_of(const std::string& path) {
  struct stat status;
  if (stat(path.c_str(), &status))
    throw CoreError(Failure::host_read, "weights file " + path + " cannot be examined: " + std::strerror(errno));
  return status.st_dev;
}

class SpawnActions {
 public:
  explicit SpawnActions(int output) {
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&files, output, STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&files, output, STDERR_FILENO);
    // A session of its own: an interrupt at the terminal is for the process that asked. Signals as in a new process.
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    sigset_t signals;
    sigemptyset(&signals);
    posix_spawnattr_setsigmask(&attributes, &signals);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGPIPE);
    posix_spawnattr_setsigdefault(&attributes, &signals);
  }
  ~SpawnActions() {
    posix_spawn_file_actions_destroy(&files);
    posix_spawnattr_destroy(&attributes);
  }
  posix_spawn_file_actions_t files;
  posix_spawnattr_t attributes;
};

std::string last_line(std::string text) {
  while (!text.empty() && std::isspace((unsigned char)text.back())) text.pop_back();
  if (text.empty()) return "it said nothing";
  return text.substr(text.rfind('\n') + 1);
}

std::string problem_of(int status, const std::string& said) {
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return "";
  const std::string line = last_line(said);
  if (WIFSIGNALED(status))
    return "the process that tried one page was ended by signal " + std::to_string(WTERMSIG(status)) + " (" +
           strsignal(WTERMSIG(status)) + "): " + line;
  if (WEXITSTATUS(status) == kProbeRefused) return line;
  return "the process that tried one page ended with code " + std::to_string(WEXITSTATUS(status)) + ": " + line;
}

}  // namespace

std::optional<std::string> ProbeAnswers::find(const Key& key) {
  std::lock_guard<std::mutex> hold(lock_);
  const auto found = known_.find(key);
  return found == known_.end() ? std::nullopt : std::optional<std::string>(found->second);
}

void ProbeAnswers::keep(const Key& key, const std::string& problem) {
  std::lock_guard<std::mutex> hold(lock_);
  known_.emplace(key, problem);
}

ProbeAnswers& probe_answers() {
  // Never destroyed: a thread may still ask while static objects are destroyed.
  static ProbeAnswers* made = new ProbeAnswers;
  return *made;
}

std::string probe_program() {
  Dl_info self;
  if (!dladdr(reinterpret_cast<void*>(&probe_program), &self) || !self.dli_fname)
    throw CoreError(Failure::registration, "the core cannot find its own place, beside which the probe is");
  const std::string library = self.dli_fname;
  const size_t slash = library.rfind('/');
  return (slash == std::string::npos ? "." : library.substr(0, slash)) + "/penstock_probe";
}

RegistrationProbe::RegistrationProbe(const std::string& path, int32_t device_index, const std::string& program,
                                     double timeout_s, ProbeAnswers& answers)
    : path_(path), key_(device_index, file_system_of(path)), timeout_s_(timeout_s), answers_(answers) {
  if (answers_.find(key_)) return;
  int ends[2];
  if (pipe2(ends, O_CLOEXEC)) refuse(path, device_index, std::string("there is no pipe: ") + std::strerror(errno));
  output_ = ends[0];
  fcntl(output_, F_SETFL, O_NONBLOCK);
  const std::string number = std::to_string(device_index);
  char* const arguments[] = {const_cast<char*>(program.c_str()), const_cast<char*>(path_.c_str()),
                             const_cast<char*>(number.c_str()), nullptr};
  const SpawnActions actions(ends[1]);
  const int code = posix_spawn(&child_, program.c_str(), &actions.files, &actions.attributes, arguments, environ);
  close(ends[1]);
  if (!code) return;
  close(output_);
  refuse(path, device_index, "the program " + program + ", which would try one page, cannot be started: " +
                               std::strerror(code));
}

RegistrationProbe::~RegistrationProbe() {
  if (child_) kill_child();
  if (output_ >= 0) close(output_);
}

void RegistrationProbe::require(int32_t (*on_wait)(int64_t)) {
  const std::string problem = answer(on_wait);
  if (!problem.empty()) refuse(path_, key_.first, problem);
}

std::string RegistrationProbe::answer(int32_t (*on_wait)(int64_t)) {
  const Clock::time_point deadline = Clock::now() + std::chrono::microseconds((int64_t)(timeout_s_ * 1e6));
  for (;;) {
    // Another probe of the same device and file system may have been answered meanwhile.
    if (const auto known = answers_.find(key_)) return *known;
    if (on_wait && on_wait(0)) {
      kill_child();
      throw CoreError(Failure::usage, "given up while registration of " + path_ + " was tried");
    }
    if (has_ended()) {
      const std::string problem = problem_of(status_, said_);
      answers_.keep(key_, problem);
      return problem;
    }
    if (Clock::now() < deadline) continue;
    char limit[32];
    std::snprintf(limit, sizeof limit, "%g", timeout_s_);
    const std::string problem = "registering one page did not return within " + std::string(limit) +
                                " s: the driver hangs (" + kill_child() + ")";
    answers_.keep(key_, problem);
    return problem;
  }
}

// Waits for a tick at most. If the child has ended, all of its output has been read.
bool RegistrationProbe::has_ended() {
  pollfd output{output_, POLLIN, 0};
  poll(&output, 1, kTickMs);
  // The pipe is closed, so there is nothing to wait for on it. The child goes on or is about to end.
  if (output.revents == POLLHUP) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  read_output();
  const pid_t ended = waitpid(child_, &status_, WNOHANG);
  if (!ended) return false;
  child_ = 0;
  read_output();
  // A process that ignores SIGCHLD never learns how a child ended; the child's output is enough.
  if (ended < 0) status_ = W_EXITCODE(last_line(said_) == kProbeSucceeded ? 0 : kProbeRefused, 0);
  return true;
}

void RegistrationProbe::read_output() {
  char part[1024];
  for (ssize_t got; (got = read(output_, part, sizeof part)) > 0;) {
    said_.append(part, (size_t)got);
    if (said_.size() > kMostSaidBytes) said_.erase(0, said_.size() - kMostSaidBytes);
  }
}

std::string RegistrationProbe::kill_child() {
  const pid_t child = child_;
  child_ = 0;
  // Kills its process group, which is its own. It may have ended already.
  kill(-child, SIGKILL);
  for (const auto deadline = Clock::now() + kKillGrace; Clock::now() < deadline;
       std::this_thread::sleep_for(std::chrono::milliseconds(1)))
    if (waitpid(child, nullptr, WNOHANG)) return "the process that tried was killed";
  return "process " + std::to_string(child) + " could not be killed either: it waits in the kernel";
}

}  // namespace penstock
