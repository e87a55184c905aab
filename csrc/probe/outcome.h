// What the probe and the core agree on.
#pragma once

namespace penstock {

// The last line of a probe that ends with 0.
constexpr const char* kProbeSucceeded = "one page was registered and unregistered";
// The probe was told no, and its last line says why. Anything else but 0 is a crash.
constexpr int kProbeRefused = 3;

}  // namespace penstock
