// A session that trusts nothing: every access gets a fresh buffer, which is filled with 0xFF (NaN in every float
// format) as soon as its recorded last reader has run. A reader that the schedule does not know of reads NaN. To catch
// a kernel that writes into a weight, the buffer is compared with its source before it is filled.
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "abi/torch_abi.h"
#include "cuda/cuda_library.h"
#include "session/session.h"

namespace penstock {
namespace {

constexpr size_t kAlignment = 64;

struct Lent {
  int64_t number = 0;
  int64_t last_step = 0;
  const unsigned char* source = nullptr;
  size_t bytes = 0;
  // One of the two is set during a run.
  unsigned char* host = nullptr;
  DevicePointer device = 0;
  // What the device buffer held just before it was poisoned; compared once the run has ended.
  std::vector<unsigned char> seen;
};

std::string number_text(int64_t value) { return std::to_string(value); }

class PoisonSession final : public Session {
 public:
  PoisonSession(std::vector<Lent> accesses, int64_t steps, bool on_cuda)
      : accesses_(std::move(accesses)), steps_(steps), on_cuda_(on_cuda) {}

  ~PoisonSession() override { release(); }

  void begin() {
    release();
    clear_error();
    next_access_ = 0;
    next_step_ = 0;
    lent_bytes_ = peak_bytes_ = 0;
  }

  bool fetch(const FetchRequest& request, TensorHandle* out) override {
    if (!error().empty()) return false;
    if (next_access_ >= accesses_.size())
      return fail("access " + number_text(request.access) + " was fetched after the last recorded one");
    Lent& lent = accesses_[next_access_];
    if (lent.number != request.access)
      return fail("the schedule diverges at position " + number_text((int64_t)next_access_) + ": recorded access " +
                  number_text(lent.number) + ", fetched access " + number_text(request.access));
    if (lent.last_step < next_step_)
      return fail("access " + number_text(request.access) + " was fetched after step " + number_text(lent.last_step) +
                  ", its recorded last reader, had ended");
    void* data = nullptr;
    if (!acquire(lent, request.device_index, &data)) return false;
    next_access_++;
    std::vector<int64_t> strides(request.rank);
    int64_t step = 1;
    for (int64_t d = request.rank - 1; d >= 0; --d) {
      strides[d] = step;
      step *= request.sizes[d] > 0 ? request.sizes[d] : 1;
    }
    if (torch_abi().create_tensor_from_blob(data, request.rank, request.sizes, strides.data(), 0, request.dtype,
                                            request.device_type, request.device_index, out))
      return fail("torch could not make a tensor for access " + number_text(request.access));
    return true;
  }

  void done(int64_t step) override {
    if (!error().empty()) return;
    if (step != next_step_) {
      fail("step " + number_text(step) + " ended where step " + number_text(next_step_) + " was due");
      return;
    }
    next_step_++;
    for (size_t i = 0; i < next_access_; ++i)
      if (accesses_[i].last_step == step && !retire(accesses_[i])) return;
  }

  // Whether the run was whole: every access made, every step ended, no weight written.
  bool end() {
    if (!error().empty()) return false;
    if (next_access_ != accesses_.size())
      return fail("the run made " + number_text((int64_t)next_access_) + " of " +
                  number_text((int64_t)accesses_.size()) + " recorded accesses");
    if (next_step_ != steps_)
      return fail("the run ended " + number_text(next_step_) + " of " + number_text(steps_) + " recorded steps");
    if (on_cuda_) {
      if (int code = cuda_library().synchronize(stream_)) return fail(cuda_error_text(code));
      for (Lent& lent : accesses_)
        if (std::memcmp(lent.seen.data(), lent.source, lent.bytes) != 0) return written(lent);
    }
    return true;
  }

  bool owns(const void* pointer) const {
    auto address = reinterpret_cast<uintptr_t>(pointer);
    for (const Lent& lent : accesses_) {
      auto start = on_cuda_ ? (uintptr_t)lent.device : reinterpret_cast<uintptr_t>(lent.host);
      if (start && address >= start && address < start + lent.bytes) return true;
    }
    return false;
  }

  int64_t peak_bytes() const { return peak_bytes_; }

 private:
  bool acquire(Lent& lent, int32_t device_index, void** data) {
    size_t capacity = lent.bytes ? lent.bytes : 1;
    if (on_cuda_) {
      if (torch_abi().current_cuda_stream(device_index, &stream_)) return fail("torch gave no CUDA stream");
      if (int code = cuda_library().mem_alloc(&lent.device, capacity)) return fail(cuda_error_text(code));
      if (lent.bytes)
        if (int code = cuda_library().copy_to_device(lent.device, lent.source, lent.bytes, stream_))
          return fail(cuda_error_text(code));
      *data = reinterpret_cast<void*>(lent.device);
    } else {
      lent.host = static_cast<unsigned char*>(::operator new(capacity, std::align_val_t(kAlignment), std::nothrow));
      if (!lent.host) return fail("no memory for access " + number_text(lent.number));
      std::memcpy(lent.host, lent.source, lent.bytes);
      *data = lent.host;
    }
    lent_bytes_ += (int64_t)lent.bytes;
    if (lent_bytes_ > peak_bytes_) peak_bytes_ = lent_bytes_;
    return true;
  }

  // The last reader has run. The buffer stays allocated until the run ends, so that a late reader finds poison and not
  // someone else's bytes.
  bool retire(Lent& lent) {
    lent_bytes_ -= (int64_t)lent.bytes;
    if (!on_cuda_) {
      if (std::memcmp(lent.host, lent.source, lent.bytes) != 0) return written(lent);
      std::memset(lent.host, kPoison, lent.bytes);
      return true;
    }
    lent.seen.resize(lent.bytes);
    if (!lent.bytes) return true;
    if (int code = cuda_library().copy_to_host(lent.seen.data(), lent.device, lent.bytes, stream_))
      return fail(cuda_error_text(code));
    if (int code = cuda_library().fill(lent.device, kPoison, lent.bytes, stream_)) return fail(cuda_error_text(code));
    return true;
  }

  bool written(const Lent& lent) {
    return fail("the compiled program wrote into the weight of access " + number_text(lent.number));
  }

  void release() {
    if (on_cuda_ && stream_used()) cuda_library().synchronize(stream_);
    for (Lent& lent : accesses_) {
      if (lent.host) ::operator delete(lent.host, std::align_val_t(kAlignment));
      if (lent.device) cuda_library().mem_free(lent.device);
      lent.host = nullptr;
      lent.device = 0;
      lent.seen.clear();
    }
  }

  bool stream_used() const {
    for (const Lent& lent : accesses_)
      if (lent.device) return true;
    return false;
  }

  std::vector<Lent> accesses_;
  int64_t steps_;
  bool on_cuda_;
  size_t next_access_ = 0;
  int64_t next_step_ = 0;
  int64_t lent_bytes_ = 0;
  int64_t peak_bytes_ = 0;
  DeviceStream stream_ = nullptr;
};

thread_local std::string create_error;

}  // namespace
}  // namespace penstock

using penstock::PoisonSession;

extern "C" {

// Null on failure; penstock_create_error says why.
void* penstock_poison_create(int64_t accesses, const int64_t* numbers, const int64_t* last_steps,
                             const void* const* sources, const int64_t* bytes, int64_t steps, int32_t on_cuda) {
  penstock::create_error = penstock::load_torch_abi();
  if (penstock::create_error.empty() && on_cuda) penstock::create_error = penstock::load_cuda_library();
  if (penstock::create_error.empty() && on_cuda && !penstock::torch_abi().current_cuda_stream)
    penstock::create_error = "this build of torch has no CUDA";
  if (!penstock::create_error.empty()) return nullptr;
  std::vector<penstock::Lent> lent(accesses);
  for (int64_t i = 0; i < accesses; ++i) {
    lent[i].number = numbers[i];
    lent[i].last_step = last_steps[i];
    lent[i].source = static_cast<const unsigned char*>(sources[i]);
    lent[i].bytes = (size_t)bytes[i];
  }
  return new PoisonSession(std::move(lent), steps, on_cuda != 0);
}

const char* penstock_create_error() { return penstock::create_error.c_str(); }

void penstock_poison_begin(void* session) {
  auto* poison = static_cast<PoisonSession*>(session);
  poison->begin();
  penstock::set_current_session(poison);
}

// 0 when the run was whole.
int32_t penstock_poison_end(void* session) {
  penstock::set_current_session(nullptr);
  return static_cast<PoisonSession*>(session)->end() ? 0 : 1;
}

const char* penstock_poison_error(void* session) { return static_cast<PoisonSession*>(session)->error().c_str(); }
int32_t penstock_poison_owns(void* session, const void* pointer) {
  return static_cast<PoisonSession*>(session)->owns(pointer) ? 1 : 0;
}
int64_t penstock_poison_peak_bytes(void* session) { return static_cast<PoisonSession*>(session)->peak_bytes(); }
void penstock_poison_destroy(void* session) { delete static_cast<PoisonSession*>(session); }

}  // extern "C"
