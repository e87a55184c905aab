// Hands out the block of a method, piece by piece.
#include "transfer_memory.h"

#include "core.h"
#include "load_error.h"

namespace penstock_executorch {
namespace {

// TRANSFER_ALIGNMENT_BYTES of src/penstock/executorch/description.py.
constexpr int64_t kAlignmentBytes = 256;

}  // namespace

TransferMemory::TransferMemory(void* session, int64_t bytes, const std::string& method)
    : session_(session), bytes_(bytes), method_(method) {
  if (!bytes) return;
  start_ = static_cast<char*>(core().session_allocate_host(session, bytes));
  if (!start_)
    throw LoadError((Failure)core().failure(), "the inputs and outputs of method '" + method + "' pass through " +
                                                 format_bytes(bytes) + " of pinned memory, which could not be had: " +
                                                 core().failure_text());
}

TransferMemory::~TransferMemory() {
  if (start_) core().session_free_host(session_, start_);
}

void* TransferMemory::take(int64_t bytes) {
  const int64_t begin = taken_bytes_;
  if (bytes > bytes_ - begin)
    throw LoadError(Kind::package, "inputs and outputs of method '" + method_ + "' take more than the " +
                                     std::to_string(bytes_) + " bytes that the program says they take at most");
  taken_bytes_ += (bytes + kAlignmentBytes - 1) / kAlignmentBytes * kAlignmentBytes;
  return start_ + begin;
}

}  // namespace penstock_executorch
