// What the probe and the core agree on.
#pragma once

namespace penstock {

// The last line of a probe that ends with 0.
constexpr const char* kProbeSucceeded = "one page was registered and unregistered";
// The exit code of a refusal; the last line says why. Any other code but 0 is a crash.
constexpr int kProbeRefused = 3;

}  // namespace penstock
