/* Adam where all five arrays have 16 bits an element.

   A 32-bit lane then holds two neighbours of each array, which a shift and a mask take apart and put together again.
   With a lane for each element it would take several instructions more, and blocks in fp32 between the steps. These
   loops do not treat NaNs and infinities. The largest result shows where there are any, and such blocks are left to the
   loops of adam.h. */

#pragma once

#include "adam.h"

typedef uint32_t __attribute__((may_alias, aligned(2))) pair; /* two elements, with the first in the lower half */

typedef struct {
    pair weight[BLOCK / 2], remainder[BLOCK / 2], exp_avg[BLOCK / 2], exp_avg_sq[BLOCK / 2];
} pair_block;

enum { LITTLE_ENDIAN_PAIRS = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ };
static const uint32_t UPPER = 0xffff0000u, HUGE_BITS = 0x7f7f0000u; /* from there on rounding is no addition */

static inline uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

/* Updates one element in fp32 bits: returns the new master and writes the moments, whose upper halves count. */
static inline uint32_t adam_lane(uint32_t master, uint32_t grad, uint32_t *restrict exp_avg,
                                 uint32_t *restrict exp_avg_sq, const adam_scalars s, const int l2, uint32_t seed,
                                 uint32_t *restrict largest) {
    float wide_m = float_of(*exp_avg), wide_v = float_of(*exp_avg_sq);
    const uint32_t p = bits_of(adam_element(float_of(master), float_of(grad), &wide_m, &wide_v, s, l2));
    const uint32_t m = bits_of(wide_m), v = bits_of(wide_v), random = random_of(m, v, seed);
    /* The momentum needs no check: where it is NaN so is p, and a decayed bf16 is too small to round to infinity. */
    *largest = larger(*largest, larger(v, p & 0x7fffffffu));
    *exp_avg = m + (random & 0xffffu);
    *exp_avg_sq = v + (random >> 16);
    return p;
}

static inline uint32_t adam_lanes(const pair *restrict weight, const pair *restrict remainder,
                                  const pair *restrict exp_avg, const pair *restrict exp_avg_sq,
                                  const pair *restrict grad, int64_t count, const adam_scalars s, const int l2,
                                  pair_block *restrict new) {
    const uint32_t seed = seed_of(s.step);
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        const uint32_t w = weight[i], r = remainder[i], g = grad[i];
        uint32_t m0 = exp_avg[i] << 16, m1 = exp_avg[i] & UPPER, v0 = exp_avg_sq[i] << 16, v1 = exp_avg_sq[i] & UPPER;
        const uint32_t old0 = (w << 16) + (uint32_t)((int32_t)(r << 16) >> 16);
        const uint32_t old1 = (w & UPPER) + (uint32_t)((int32_t)r >> 16);
        const uint32_t p0 = adam_lane(old0, g << 16, &m0, &v0, s, l2, seed, &largest);
        const uint32_t p1 = adam_lane(old1, g & UPPER, &m1, &v1, s, l2, seed, &largest);
        new->weight[i] = ((p0 + 0x8000u) >> 16) | ((p1 + 0x8000u) & UPPER);
        new->remainder[i] = (p0 & 0xffffu) | (p1 << 16);
        new->exp_avg[i] = (m0 >> 16) | (m1 & UPPER);
        new->exp_avg_sq[i] = (v0 >> 16) | (v1 & UPPER);
    }
    return largest;
}

/* Returns whether new holds the update of count elements from first on. Otherwise the other loops do the work. */
static inline int adam_pairs(const void *weight, int weight_dtype, const void *master, const void *exp_avg,
                             const void *exp_avg_sq, int moment_dtype, const void *grad, int grad_dtype, int64_t first,
                             int64_t count, const adam_scalars s, pair_block *restrict new) {
    if (!LITTLE_ENDIAN_PAIRS || weight_dtype != BF16 || moment_dtype != BF16 || grad_dtype != BF16 || count % 2)
        return 0;
    const pair *w = (const pair *)((const uint16_t *)weight + first);
    const pair *r = (const pair *)((const int16_t *)master + first);
    const pair *m = (const pair *)((const uint16_t *)exp_avg + first);
    const pair *v = (const pair *)((const uint16_t *)exp_avg_sq + first);
    const pair *g = (const pair *)((const uint16_t *)grad + first);
    const uint32_t largest = s.l2 != 0.0f ? adam_lanes(w, r, m, v, g, count / 2, s, 1, new)
                                          : adam_lanes(w, r, m, v, g, count / 2, s, 0, new);
    return largest < HUGE_BITS;
}

static inline void copy_pairs(void *restrict target, const pair *restrict source, int64_t count) {
    for (int64_t i = 0; i < count; i++) ((pair *)target)[i] = source[i];
}
