// Runs a whole grid, cluster after cluster.
#include "fibers.h"

extern "C" {

void emulated_kernel(const penstock::SplitParams* params);
int emulated_threads();

// Empty on success, otherwise what went wrong. `host_bytes_read`: what the copies read of tensors marked as the host's.
const char* emulate(const penstock::SplitParams* params, int clusters, int cluster_ctas, int shared_bytes,
                    int copies_land, unsigned long long seed, unsigned long long* host_bytes_read) {
  static std::string failure;
  penstock::Machine machine;
  penstock::machine_pointer() = &machine;
  machine.random.seed(seed);
  machine.threads = (penstock::u32)emulated_threads();
  machine.kernel = [&] { emulated_kernel(params); };
  try {
    for (int cluster = 0; cluster < clusters && machine.failure.empty(); ++cluster)
      machine.run_cluster((penstock::u32)cluster, (penstock::u32)cluster_ctas, (penstock::u32)shared_bytes,
                          copies_land);
  } catch (const std::exception& error) {
    machine.failure = error.what();
  }
  *host_bytes_read = machine.host_bytes_read;
  failure = machine.failure;
  penstock::machine_pointer() = nullptr;
  return failure.c_str();
}
}
