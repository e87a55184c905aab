// Puts layouts into torch's words: ExecuTorch has other names for dtypes, and here they are numbers.
#include "tensor_layout.h"

#include <iterator>
#include <numeric>

#include "load_error.h"

namespace penstock_executorch {
namespace {

// By ExecuTorch's number.
constexpr const char* kDtypes[] = {
    "uint8",      "int8",      "int16",     "int32",       "int64",         "float16",         "float32",
    "float64",    "complex32", "complex64", "complex128",  "bool",          "qint8",           "quint8",
    "qint32",     "bfloat16",  "quint4x2",  "quint2x4",    "bits1x8",       "bits2x4",         "bits4x2",
    "bits8",      "bits16",    "float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz", "uint16",
    "uint32",     "uint64"};

}  // namespace

std::string dtype_text(int64_t scalar_type) {
  const bool is_known = scalar_type >= 0 && scalar_type < (int64_t)std::size(kDtypes);
  return is_known ? kDtypes[scalar_type] : "scalar type " + std::to_string(scalar_type);
}

std::vector<int64_t> memory_order(const std::vector<int64_t>& shape, const std::vector<int64_t>& order) {
  std::vector<int64_t> out;
  for (int64_t size : shape)
    if (size == 0) return out;
  for (int64_t dim : order)
    if (dim >= 0 && (size_t)dim < shape.size() && shape[(size_t)dim] != 1) out.push_back(dim);
  return out;
}

std::string layout_text(int64_t scalar_type, const std::vector<int64_t>& shape, const std::vector<int64_t>& order) {
  std::vector<int64_t> plain(shape.size());
  std::iota(plain.begin(), plain.end(), int64_t{0});
  return dtype_text(scalar_type) + listed(shape) + (order == plain ? "" : " with dim order " + listed(order));
}

}  // namespace penstock_executorch
