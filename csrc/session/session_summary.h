// Says in one line what a session was set up to do, the same for Python and for C++.
#pragma once

#include <string>

#include "penstock_core.h"
#include "session/engine.h"

namespace penstock {

// `asked`: what the session does not know about itself.
std::string session_summary(Engine& over, const PenstockSummary& asked);

}  // namespace penstock
