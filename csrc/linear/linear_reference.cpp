// The sums themselves, with the conversions from half precision and back.
#include "linear/linear_reference.h"

#include <cstring>
#include <vector>

namespace penstock {
namespace {

// Tokens that are summed side by side. The last group is padded, so that the same instructions make every sum.
constexpr int64_t kGroup = 8;

float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

bool is_nan(uint32_t bits) { return (bits & 0x7FFFFFFFu) > 0x7F800000u; }

struct Bfloat16 {
  static float widen(uint16_t value) { return from_bits((uint32_t)value << 16); }
  static uint16_t round(float value) {
    uint32_t bits = bits_of(value);
    if (is_nan(bits)) return 0x7FC0;
    return (uint16_t)((bits + 0x7FFFu + ((bits >> 16) & 1)) >> 16);
  }
};

struct Float16 {
  static float widen(uint16_t value) {
    uint32_t sign = (uint32_t)(value & 0x8000) << 16, exponent = (value >> 10) & 31, mantissa = value & 0x3FF;
    if (exponent == 31) return from_bits(sign | 0x7F800000u | mantissa << 13);
    if (exponent) return from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
    float magnitude = (float)mantissa * 0x1p-24f;  // subnormal, and exact
    return sign ? -magnitude : magnitude;
  }
  static uint16_t round(float value) {
    uint32_t bits = bits_of(value), magnitude = bits & 0x7FFFFFFFu;
    auto sign = (uint16_t)(bits >> 16 & 0x8000);
    if (is_nan(bits)) return 0x7E00;
    // From 65,536 on. A smaller value that rounds to 65,536 becomes infinity below.
    if (magnitude >= 0x47800000u) return sign | 0x7C00;
    if (magnitude < 0x38800000u) {
      // Subnormal: this sum's last bit is worth 2^-24, and the addition rounds to it.
      float shifted = from_bits(magnitude) + 0.5f;
      return sign | (uint16_t)(bits_of(shifted) - bits_of(0.5f));
    }
    uint32_t rounded = magnitude + 0xFFFu + (magnitude >> 13 & 1);
    return sign | (uint16_t)((rounded >> 13) - (112u << 10));
  }
};

template <typename Format>
void multiply(const LinearCase& which, const LinearCall& call) {
  auto at = [](uint64_t address) { return reinterpret_cast<const uint16_t*>(address); };
  const uint16_t *prefix = at(which.prefix_address), *rest = at(which.rest_address), *bias = at(call.bias_address);
  auto* y = reinterpret_cast<uint16_t*>(call.y_address);
  int64_t depth = which.depth, groups = (which.tokens + kGroup - 1) / kGroup;
  std::vector<float> row(depth), x(groups * depth * kGroup);
  for (int64_t t = 0; t < which.tokens; ++t)
    for (int64_t k = 0; k < depth; ++k)
      x[(t / kGroup * depth + k) * kGroup + t % kGroup] = Format::widen(at(call.x_address)[t * call.x_stride + k]);
  for (int64_t n = 0; n < which.rows; ++n) {
    const uint16_t* from = n < which.prefix_rows ? prefix + n * depth : rest + (n - which.prefix_rows) * depth;
    for (int64_t k = 0; k < depth; ++k) row[k] = Format::widen(from[k]);
    float added = bias ? Format::widen(bias[n]) : 0.0f;
    for (int64_t g = 0; g < groups; ++g) {
      const float* group = &x[g * depth * kGroup];
      float sums[kGroup] = {};
      for (int64_t k = 0; k < depth; ++k)
        for (int64_t t = 0; t < kGroup; ++t) sums[t] += group[k * kGroup + t] * row[k];
      for (int64_t t = g * kGroup; t < (g + 1) * kGroup && t < which.tokens; ++t)
        y[t * call.y_stride + n] = Format::round(sums[t % kGroup] + added);
    }
  }
}

}  // namespace

void reference_linear(const LinearCase& which, const LinearCall& call) {
  if (which.is_bf16) multiply<Bfloat16>(which, call);
  else multiply<Float16>(which, call);
}

}  // namespace penstock
