// What compiled code calls: one C function per device for a fetch, one for the end of a step. These are direct calls,
// without the dispatcher or Python. AOTInductor fixes their names: aoti_torch_<device>_<op name>.
#include <cstdio>

#include "session/session.h"

namespace penstock {
namespace {
thread_local Session* session_of_thread = nullptr;

int32_t fetch(const FetchRequest& request, TensorHandle* out) {
  Session* session = session_of_thread;
  if (!session) {
    // Outside a session nobody keeps the error, and the caller reduces it to a number.
    std::fprintf(stderr, "penstock: access %lld was fetched outside of a session\n", (long long)request.access);
    return 1;
  }
  return session->fetch(request, out) ? 0 : 1;
}

}  // namespace

Session* current_session() { return session_of_thread; }
void set_current_session(Session* session) { session_of_thread = session; }

}  // namespace penstock

extern "C" {

int32_t aoti_torch_cpu_penstock_weight(int64_t access, const int64_t* sizes, int64_t rank, int32_t dtype,
                                       int32_t device_type, int32_t device_index, void** out) {
  return penstock::fetch({access, sizes, rank, dtype, device_type, device_index}, out);
}

int32_t aoti_torch_cuda_penstock_weight(int64_t access, const int64_t* sizes, int64_t rank, int32_t dtype,
                                        int32_t device_type, int32_t device_index, void** out) {
  return penstock::fetch({access, sizes, rank, dtype, device_type, device_index}, out);
}

void penstock_done(int64_t step) {
  if (penstock::Session* session = penstock::current_session()) session->done(step);
}

}  // extern "C"
