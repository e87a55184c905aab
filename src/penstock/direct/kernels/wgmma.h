// Warpgroup matrix products: 64 rows of A times TILE_TOKENS rows of B over 16 columns, both from shared memory and both
// with their columns (K) contiguous, added to 32-bit accumulators.
//
// The accumulators of a thread: d[4j + 2h + e] is row 16 * warp + lane / 4 + 8 * h, column 8 * j + 2 * (lane % 4) + e
// of the 64 x TILE_TOKENS product, `warp` counted within the warpgroup.
#pragma once

#include "ptx.h"

namespace penstock {

// Orders earlier accesses to the accumulators before the products that follow.
DEVICE void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Returns when at most this many of the committed groups are still at work.
template <int kPending>
DEVICE void await_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving reads of the accumulators above the wait.
DEVICE void settle_products(float (&d)[TILE_TOKENS / 2]) {
#pragma unroll
  for (int i = 0; i < TILE_TOKENS / 2; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#if ELEMENT_BF16
#define PENSTOCK_TYPES ".f32.bf16.bf16 "
#else
#define PENSTOCK_TYPES ".f32.f16.f16 "
#endif

// The accumulators' places in the asm text, in lists that continue one another, and the operands that fill them.
#define PENSTOCK_PLACES_4 "%0, %1, %2, %3"
#define PENSTOCK_PLACES_8 PENSTOCK_PLACES_4 \
  ", %4, %5, %6, %7"
#define PENSTOCK_PLACES_16 PENSTOCK_PLACES_8 \
  ", %8, %9, %10, %11, %12, %13, %14, %15"
#define PENSTOCK_PLACES_32 PENSTOCK_PLACES_16 \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PENSTOCK_PLACES_64 PENSTOCK_PLACES_32 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PENSTOCK_PLACES_96 PENSTOCK_PLACES_64 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define PENSTOCK_PLACES_128 PENSTOCK_PLACES_96 \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define PENSTOCK_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define PENSTOCK_D16(i) PENSTOCK_D4(i), PENSTOCK_D4(i + 4), PENSTOCK_D4(i + 8), PENSTOCK_D4(i + 12)
#define PENSTOCK_D32(i) PENSTOCK_D16(i), PENSTOCK_D16(i + 16)

// Operands after the accumulators: A's and B's descriptors, whether to add to what the accumulators hold (a predicate),
// then immediates: A and B not negated (1, 1), both with K contiguous (0, 0).
#define PENSTOCK_PRODUCT(N, PLACES, A, B, ADD, ...)                                                     \
  asm volatile("{\n\t.reg .pred sum;\n\tsetp.ne.b32 sum, " ADD ", 0;\n\t"                              \
               "wgmma.mma_async.sync.aligned.m64n" N "k16" PENSTOCK_TYPES "{" PLACES "}, " A ", " B     \
               ", sum, 1, 1, 0, 0;\n\t}"                                                               \
               : __VA_ARGS__                                                                            \
               : "l"(a), "l"(b), "r"(add))

DEVICE void multiply(float (&d)[TILE_TOKENS / 2], u64 a, u64 b, u32 add) {
#if TILE_TOKENS == 8
  PENSTOCK_PRODUCT("8", PENSTOCK_PLACES_4, "%4", "%5", "%6", PENSTOCK_D4(0));
#elif TILE_TOKENS == 16
  PENSTOCK_PRODUCT("16", PENSTOCK_PLACES_8, "%8", "%9", "%10", PENSTOCK_D4(0), PENSTOCK_D4(4));
#elif TILE_TOKENS == 32
  PENSTOCK_PRODUCT("32", PENSTOCK_PLACES_16, "%16", "%17", "%18", PENSTOCK_D16(0));
#elif TILE_TOKENS == 64
  PENSTOCK_PRODUCT("64", PENSTOCK_PLACES_32, "%32", "%33", "%34", PENSTOCK_D32(0));
#elif TILE_TOKENS == 128
  PENSTOCK_PRODUCT("128", PENSTOCK_PLACES_64, "%64", "%65", "%66", PENSTOCK_D32(0), PENSTOCK_D32(32));
#elif TILE_TOKENS == 192
  PENSTOCK_PRODUCT("192", PENSTOCK_PLACES_96, "%96", "%97", "%98", PENSTOCK_D32(0), PENSTOCK_D32(32), PENSTOCK_D32(64));
#elif TILE_TOKENS == 256
  PENSTOCK_PRODUCT("256", PENSTOCK_PLACES_128, "%128", "%129", "%130", PENSTOCK_D32(0), PENSTOCK_D32(32),
                   PENSTOCK_D32(64), PENSTOCK_D32(96));
#else
#error "TILE_TOKENS must be 8, 16, 32, 64, 128, 192 or 256"
#endif
}

}  // namespace penstock
