// A session answers the fetches of compiled code. Compiled code does not know its session; the calling thread does.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "driver/driver.h"

namespace penstock {

using TensorHandle = void*;  // AtenTensorHandle of the AOTInductor C ABI

struct FetchRequest {
  int64_t access;
  const int64_t* sizes;
  int64_t rank;
  int32_t dtype;
  int32_t device_type;
  int32_t device_index;
};

// y = x @ W^T + bias: x is (tokens, depth), the weight (rows, depth).
struct LinearRequest {
  TensorHandle x;
  TensorHandle weight;  // as it was lent
  TensorHandle bias;    // null: none
  int64_t access;
  int32_t device_type;
};

// Rows of a weight, along its first dimension, selected by a tensor of 64-bit numbers.
struct RowsRequest {
  TensorHandle weight;  // as it was lent
  TensorHandle index;
  int64_t access;
  int32_t device_type;
};

// Rows of x, each times its expert's matrix. An expert's rows are adjacent; `ends` (32 bits) says where each one's end.
struct GroupedRequest {
  TensorHandle x;
  TensorHandle weight;  // as it was lent: (experts, depth, columns), or as linears have it (experts, columns, depth)
  TensorHandle ends;
  bool is_linear;
  int64_t access;
  int32_t device_type;
};

class Session {
 public:
  virtual ~Session() = default;

  // Lends the weight of one access. Returns false after fail().
  virtual bool fetch(const FetchRequest& request, TensorHandle* out) = 0;

  // Multiplies with the weight of a fetched access. Returns false after fail(), or after torch refused a call: torch
  // has then reported why.
  bool linear(const LinearRequest& request, TensorHandle* out);
  // The same for rows taken by index, and for products of groups of rows.
  bool rows(const RowsRequest& request, TensorHandle* out);
  bool grouped(const GroupedRequest& request, TensorHandle* out);

  // The launches of step `step` have all been issued.
  virtual void done(int64_t step) = 0;

  // Generated code may reduce a failure to a generic one, so the session keeps the first, real error.
  const std::string& error() const { return error_; }
  Failure failure() const { return failure_; }

 protected:
  // May throw. The default is the library's product, for a weight that is whole at the address it was lent at.
  virtual void multiply(const LinearRequest& request, TensorHandle* out);
  virtual void take_rows(const RowsRequest& request, TensorHandle* out);
  virtual void multiply_groups(const GroupedRequest& request, TensorHandle* out);

  // Makes a call into torch or the driver. If it throws, returns false as linear() does.
  bool attempt(const std::function<void()>& call);

  bool fail(const std::string& message, Failure failure = Failure::divergence) {
    if (error_.empty()) {
      error_ = message;
      failure_ = failure;
    }
    return false;
  }
  void clear_error() {
    error_.clear();
    failure_ = Failure::none;
  }

 private:
  std::string error_;
  Failure failure_ = Failure::none;
};

// The session of the calling thread; null outside of a run.
Session* current_session();
void set_current_session(Session* session);

}  // namespace penstock
