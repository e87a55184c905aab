// torch multiplies on the CPU with the BLAS that it was built with. Another library with functions of the same names,
// loaded before torch's, takes its place without a word: ExecuTorch's optimized kernels hold Eigen's.
#pragma once

namespace penstock_executorch {

// Refuses where torch's products would be another library's: they would differ from those of every other process.
void check_blas();

}  // namespace penstock_executorch
