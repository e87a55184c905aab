// Compares what a program was built for with what it finds here, and words the refusal.
#include "open/build_check.h"

#include <string>

#include "driver/driver.h"

namespace penstock {
namespace {

// "2.13" of "2.13.0+cpu".
std::string minor_of(const std::string& version) { return version.substr(0, version.find('.', version.find('.') + 1)); }

[[noreturn]] void refuse(const std::string& text) { throw CoreError(Failure::build, text); }

// Outside x86, only the same instructions run.
bool runs_on(const std::string& instructions, const std::string& cpu) {
  return instructions == cpu || (instructions == "AVX2" && cpu == "AVX512");
}

}  // namespace

void check_build(const PenstockBuild& built, const PenstockBuild& here) {
  const std::string torch = built.torch, cpu = built.cpu, machine = built.machine;
  if (minor_of(torch) != minor_of(here.torch))
    refuse("the program was compiled with torch " + torch + ", this is torch " + here.torch + "; needs torch " +
           minor_of(torch) + ", or compile it again with this one");
  if (machine != here.machine) refuse("the program was compiled for " + machine + ", this machine is " + here.machine);
  if (!runs_on(cpu, here.cpu))
    refuse("the program was compiled for a CPU with " + cpu + " instructions, torch finds " + here.cpu +
           " on this one");
  if (!here.capability) return;
  const std::string capability = built.capability;
  if (capability != here.capability)
    refuse("the program was compiled for compute capability " + capability + " (" + built.gpu + "); " + here.device +
           " is " + here.gpu + " of compute capability " + here.capability);
}

}  // namespace penstock
