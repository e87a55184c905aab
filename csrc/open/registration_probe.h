// Whether one page of a file can be registered with a device, found out in a process of its own (probe/main.cpp).
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

namespace penstock {

// What each device said of each file system: the problem in words, empty where there is none. A driver does not change
// its mind within a process.
class ProbeAnswers {
 public:
  using Key = std::pair<int32_t, dev_t>;
  std::optional<std::string> find(const Key& key);
  void keep(const Key& key, const std::string& problem);

 private:
  std::mutex lock_;
  std::map<Key, std::string> known_;
};

// Of this process.
ProbeAnswers& probe_answers();

// The probe beside the core.
std::string probe_program();

// Begun here and asked later, so that it goes on beside other work: a CUDA context takes as long as planning does.
// Where the answer is known there is no child.
class RegistrationProbe {
 public:
  // Throws CoreError(registration) where no child can be started, and CoreError(host_read) where there is no such file.
  RegistrationProbe(const std::string& path, int32_t device_index, const std::string& program = probe_program(),
                    double timeout_s = 30, ProbeAnswers& answers = probe_answers());
  // A child that nobody asked for its answer, or that another one has answered for, is killed.
  ~RegistrationProbe();
  RegistrationProbe(const RegistrationProbe&) = delete;
  RegistrationProbe& operator=(const RegistrationProbe&) = delete;

  // Waits for the answer. `on_wait` is asked again and again meanwhile, and gives up by what is not 0: then there is no
  // answer. May be null. Throws CoreError(registration) where the file cannot be registered.
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
