// Finds out whether one page of a file can be registered with a device, in a separate process (probe/main.cpp).
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

namespace penstock {

// The answer for each device and file system: the problem in words, empty if there is none. A driver's answer does not
// change within a process.
class ProbeAnswers {
 public:
  using Key = std::pair<int32_t, dev_t>;
  std::optional<std::string> find(const Key& key);
  void keep(const Key& key, const std::string& problem);

 private:
  std::mutex lock_;
  std::map<Key, std::string> known_;
};

// The answers of this process.
ProbeAnswers& probe_answers();

// The path of the probe, which lies beside the core.
std::string probe_program();

// Starts at construction and is asked later, so that it runs beside other work: a CUDA context takes as long as
// planning does. If the answer is known already, there is no child.
class RegistrationProbe {
 public:
  // Throws CoreError(registration) if no child can be started, and CoreError(host_read) if there is no such file.
  RegistrationProbe(const std::string& path, int32_t device_index, const std::string& program = probe_program(),
                    double timeout_s = 30, ProbeAnswers& answers = probe_answers());
  // Kills a child that nobody asked for its answer, or whose answer another probe has found.
  ~RegistrationProbe();
  RegistrationProbe(const RegistrationProbe&) = delete;
  RegistrationProbe& operator=(const RegistrationProbe&) = delete;

  // Waits for the answer, and calls `on_wait` again and again meanwhile. If that returns anything but 0, it gives up
  // and there is no answer. `on_wait` may be null. Throws CoreError(registration) if the file cannot be registered.
  void require(int32_t (*on_wait)(int64_t));

 private:
  std::string answer(int32_t (*on_wait)(int64_t));
  bool has_ended();
  void read_output();
  std::string kill_child();

  std::string path_;
  ProbeAnswers::Key key_;
  double timeout_s_;
  ProbeAnswers& answers_;
  pid_t child_ = 0;  // 0: there is none any more
  int output_ = -1;
  int status_ = 0;
  std::string said_;
};

}  // namespace penstock
