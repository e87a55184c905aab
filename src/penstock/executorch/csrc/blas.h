// On the CPU torch multiplies with the BLAS that it was built with. Another library with functions of the same names
// that is loaded first silently takes its place: ExecuTorch's optimized kernels contain Eigen's.
#pragma once

namespace penstock_executorch {

// Refuses if another library would compute torch's products: they would differ from those of every other process.
void check_blas();

}  // namespace penstock_executorch
