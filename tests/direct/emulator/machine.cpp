// All that does not depend on the kernel's text, as one translation unit: reading the standard headers takes longest.
#include "emulated_ptx.cpp"
#include "grid.cpp"
