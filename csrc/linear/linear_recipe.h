// How the kernel of a linear is launched. The core never decides a tile: whoever offers the kernel prepares one recipe
// per case, which holds all but what changes from call to call. src/penstock/direct/recipes.py mirrors case and recipe.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../src/penstock/direct/kernels/split_params.h"

namespace penstock {

// What a recipe is for. The addresses are those of the current plan.
struct LinearCase {
  int64_t method;
  int64_t access;
  int64_t tokens;
  int64_t rows;
  int64_t depth;
  int64_t prefix_rows;  // the first rows, at prefix_address; all others are at rest_address
  uint64_t prefix_address;
  uint64_t rest_address;
  int32_t is_bf16;  // 0: fp16
};

struct LinearRecipe {
  uint64_t function;
  int64_t blocks;
  int64_t threads;
  int64_t shared_bytes;
  int64_t cluster_ctas;
  int64_t x_box_rows;
  SplitParams params;  // without x, y and bias
};
static_assert(sizeof(LinearCase) == 72, "mirrored in Python");
static_assert(sizeof(SplitParams) == 768 && alignof(SplitParams) == 128, "mirrored in Python");
static_assert(offsetof(LinearRecipe, params) == 128 && sizeof(LinearRecipe) == 896, "mirrored in Python");

// Returns 0 if it made the recipe.
using PrepareLinear = int32_t (*)(const LinearCase*, LinearRecipe*);

// What changes from call to call. x and y are contiguous, and x starts at a multiple of 16 bytes.
struct LinearCall {
  uint64_t x_address;
  uint64_t y_address;
  uint64_t bias_address;  // 0: none
  int64_t x_stride;       // in elements
  int64_t y_stride;
  int64_t tokens;
  int64_t depth;
  bool is_bf16;
};

}  // namespace penstock
