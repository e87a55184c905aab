// Makes and reads tensors.
#include "abi/tensor.h"

#include <new>

#include "abi/torch_abi.h"

namespace penstock {

bool Session::attempt(const std::function<void()>& call) {
  if (!error().empty()) return false;
  try {
    call();
    return true;
  } catch (const TorchRefusal&) {
    return false;
  } catch (const CoreError& failure) {
    return fail(failure.what(), failure.failure);
  } catch (const std::bad_alloc&) {  // the caller is generated code and must see no exception
    return fail("the host has no memory left", Failure::host_memory);
  } catch (const std::exception& failure) {
    return fail(failure.what(), Failure::usage);
  }
}

OwnedTensor::~OwnedTensor() {
  if (handle_) torch_abi().delete_tensor_object(handle_);
}

TensorHandle OwnedTensor::release() {
  TensorHandle handle = handle_;
  handle_ = nullptr;
  return handle;
}

TensorLayout::TensorLayout(TensorHandle tensor) {
  check_torch(torch_abi().get_dim(tensor, &rank));
  check_torch(torch_abi().get_sizes(tensor, &sizes));
  check_torch(torch_abi().get_strides(tensor, &strides));
  check_torch(torch_abi().get_dtype(tensor, &dtype));
}

std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> all(sizes.size());
  int64_t step = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    all[d] = step;
    step *= sizes[d];
  }
  return all;
}

std::vector<int64_t> TensorLayout::contiguous_strides() const {
  return penstock::contiguous_strides({sizes, sizes + rank});
}

bool TensorLayout::is_contiguous() const {
  std::vector<int64_t> wanted = contiguous_strides();
  // The stride of a dimension of one element means nothing.
  for (int64_t d = 0; d < rank; ++d)
    if (sizes[d] > 1 && strides[d] != wanted[(size_t)d]) return false;
  return true;
}

int64_t TensorLayout::elements() const {
  int64_t all = 1;
  for (int64_t d = 0; d < rank; ++d) all *= sizes[d];
  return all;
}

std::string TensorLayout::text() const {
  std::string all = "(";
  for (int64_t d = 0; d < rank; ++d) all += (d ? ", " : "") + std::to_string(sizes[d]);
  return all + ") of torch's dtype " + std::to_string(dtype);
}

Address data_address(TensorHandle tensor) {
  void* data = nullptr;
  check_torch(torch_abi().get_data_ptr(tensor, &data));
  return reinterpret_cast<Address>(data);
}

void make_tensor(const std::vector<int64_t>& sizes, int32_t dtype, TensorDevice device, OwnedTensor& out) {
  const std::vector<int64_t> strides = contiguous_strides(sizes);
  check_torch(torch_abi().empty_strided((int64_t)sizes.size(), sizes.data(), strides.data(), dtype, device.type,
                                        device.index, out.out()));
}

void view_tensor(TensorHandle tensor, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                 int64_t offset, OwnedTensor& out) {
  int64_t begin = 0;
  check_torch(torch_abi().get_storage_offset(tensor, &begin));
  check_torch(torch_abi().reinterpret(tensor, (int64_t)sizes.size(), sizes.data(), strides.data(), begin + offset,
                                      out.out()));
}

void multiply_groups(TensorHandle rows, TensorHandle matrices, TensorHandle ends, OwnedTensor& out) {
  // The call takes over the handles on its stack, so each is a new one.
  auto handle = [](TensorHandle tensor) {
    OwnedTensor again;
    check_torch(torch_abi().new_tensor_handle(tensor, again.out()));
    return reinterpret_cast<uint64_t>(again.release());
  };
  // An optional argument is a pointer to its value, which the callee frees. No bias and no dtype are given.
  uint64_t stack[5] = {handle(rows), handle(matrices), 0, 0, 0};
  stack[2] = reinterpret_cast<uint64_t>(new uint64_t(handle(ends)));
  check_torch(torch_abi().call("aten::_grouped_mm", "", stack));
  *out.out() = reinterpret_cast<TensorHandle>(stack[0]);
}

TensorHandle laid_out(TensorHandle tensor, TensorDevice device, Address alignment, OwnedTensor& copy) {
  TensorLayout layout(tensor);
  if (layout.is_contiguous() && data_address(tensor) % alignment == 0) return tensor;
  if (copy.get()) return copy.get();
  make_tensor({layout.sizes, layout.sizes + layout.rank}, layout.dtype, device, copy);
  check_torch(torch_abi().copy(copy.get(), tensor, 0));
  return copy.get();
}

}  // namespace penstock
