// The kernel's own text over the emulated instructions: the only file that is compiled again for each kind of tile.
#include "split_linear.cu"

extern "C" {

int emulated_params_bytes() { return (int)sizeof(penstock::SplitParams); }
int emulated_threads() { return penstock::kThreads; }
void emulated_kernel(const penstock::SplitParams* params) { penstock::run_split_linear(*params); }
}
