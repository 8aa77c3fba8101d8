/* What the host kernels of protrain_kernels share. Their arithmetic is that of the Triton kernels, bit for bit.

   Every function cuts its range into blocks that fit the L1 cache. It widens a block to fp32, computes in fp32 with
   separate multiplies and adds (build with -ffp-contract=off, never with -ffast-math), and narrows the result. The
   loops over a block have no branches and no aliases, so that compilers vectorise them. A thread takes the next run of
   blocks whenever it is free. With equal shares for all threads, every call would last as long as the thread that
   shares its core with the launching thread. */

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__F16C__) || defined(__AVX__)
#include <immintrin.h>
#endif

enum { BF16 = 0, FP16 = 1, FP32 = 2 };
enum { BLOCK = 512, PART = 128, LANES = 1024, ROWS = 16, TILE = LANES * ROWS, PADDING = 128 };
/* PART is the block of a loop that also writes around the cache, where only few streams at a time are fast. */
enum { RUN = 32768, BLOCKS_OF_RUN = RUN / BLOCK, TILES_OF_RUN = RUN / TILE }; /* elements taken at a time */
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

/* The calling thread does what fits one run, because waking other threads takes longer, and far longer where other
   processes have the cores. All threads share anything larger, because OpenMP ends and starts threads whenever the size
   of a team changes. */
static inline int sharing(int64_t count, int threads) { return count > RUN ? threads : 1; }

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* ---- 16-bit floats ----
   The functions over a block are static but not inline. When they are inlined, gcc 12 makes AdamW's loops 5% slower
   (fp32 moments, in the caches of a Zen 4). */

static inline float widen_half(uint16_t half) {
    const uint32_t infinity = 0x7c00u << 13;
    uint32_t bits = (uint32_t)(half & 0x7fffu) << 13;
    const uint32_t exponent = bits & infinity;
    bits += (127u - 15u) << 23;
    bits += exponent == infinity ? (128u - 16u) << 23 : 0u;
    /* A subnormal half is a normal fp32 number. Borrowing an exponent and subtracting the implicit one is exact. */
    const uint32_t subnormal = bits_of(float_of(bits + (1u << 23)) - float_of(113u << 23));
    bits = exponent == 0 ? subnormal : bits;
    return float_of(bits | (uint32_t)(half & 0x8000u) << 16);
}

static inline uint16_t narrow_half(float value) {
    uint32_t bits = bits_of(value);
    const uint32_t sign = bits & 0x80000000u;
    const uint32_t magic = (127u - 15u + 23u - 10u + 1u) << 23;
    bits ^= sign;
    /* Adding the magic number makes the fp32 adder round to a multiple of the smallest half, ties to even. */
    const uint32_t small = bits_of(float_of(bits) + float_of(magic)) - magic;
    const uint32_t normal = (bits + ((uint32_t)(15 - 127) << 23) + 0xfffu + ((bits >> 13) & 1u)) >> 13;
    const uint32_t huge = bits > (255u << 23) ? 0x7e00u : 0x7c00u;
    const uint32_t half = bits >= (143u << 23) ? huge : (bits < (113u << 23) ? small : normal);
    return (uint16_t)(half | sign >> 16);
}

static void widen_halves(const uint16_t *restrict source, int64_t count, float *restrict values) {
    int64_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(values + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(source + i))));
#endif
    for (; i < count; i++) values[i] = widen_half(source[i]);
}

static void narrow_halves(const float *restrict values, int64_t count, uint16_t *restrict target) {
    int64_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= count; i += 8)
        _mm_storeu_si128((__m128i *)(target + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(values + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#endif
    for (; i < count; i++) target[i] = narrow_half(values[i]);
}

static void widen(const void *restrict source, int dtype, int64_t first, int64_t count, float *restrict values) {
    if (dtype == BF16) {
        const uint16_t *restrict from = (const uint16_t *)source + first;
        for (int64_t i = 0; i < count; i++) values[i] = float_of((uint32_t)from[i] << 16);
    } else if (dtype == FP16) {
        widen_halves((const uint16_t *)source + first, count, values);
    } else {
        const float *restrict from = (const float *)source + first;
        for (int64_t i = 0; i < count; i++) values[i] = from[i];
    }
}

/* The block in fp32: the source itself where it is fp32 already, or else a copy in buffer. */
static const float *widened(const void *source, int dtype, int64_t first, int64_t count, float *buffer) {
    if (dtype == FP32) return (const float *)source + first;
    widen(source, dtype, first, count, buffer);
    return buffer;
}

/* The nearest bf16, with ties to even, as fp32 bits whose lower half is zero. */
static inline uint32_t round_brain(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
    return value != value ? 0x7fc00000u : rounded;
}

/* At most LANES fp32 values times factor, rounded once to dtype, and fp32 again. */
static void round_products(const float *restrict values, int64_t count, float factor, int dtype,
                           float *restrict products) {
    if (dtype == BF16) {
        for (int64_t i = 0; i < count; i++) products[i] = float_of(round_brain(values[i] * factor));
        return;
    }
    for (int64_t i = 0; i < count; i++) products[i] = values[i] * factor;
    if (dtype == FP16) {
        uint16_t halves[LANES];
        narrow_halves(products, count, halves);
        widen_halves(halves, count, products);
    }
}

/* The block of a finished gradient in fp32, by the formula of rounding.py: an fp32 sum is multiplied by factor and
   rounded once to the type of the weight, and a gradient of 16 bits is finished already. It is the gradient itself
   where that changes nothing, or else a copy in buffer, which has room for at most LANES. */
static const float *finished(const void *grad, int grad_dtype, int weight_dtype, float factor, int64_t first,
                             int64_t count, float *buffer) {
    if (grad_dtype != FP32 || (weight_dtype == FP32 && factor == 1.0f))
        return widened(grad, grad_dtype, first, count, buffer);
    round_products((const float *)grad + first, count, factor, weight_dtype, buffer);
    return buffer;
}

/* ---- split master: fp32 bits = (weight bits << 16) + remainder ---- */

static inline void split_block(const float *restrict master, int64_t count, uint16_t *restrict weight,
                               int16_t *restrict remainder) {
    for (int64_t i = 0; i < count; i++) {
        const uint32_t bits = bits_of(master[i]);
        const uint32_t rounded = (bits + 0x8000u) >> 16;
        const int nan = (bits & 0x7fffffffu) > 0x7f800000u;
        weight[i] = (uint16_t)(nan ? 0x7fc0u : rounded);
        remainder[i] = (int16_t)(uint16_t)(nan ? 0u : bits - (rounded << 16));
    }
}

static inline void join_block(const uint16_t *restrict weight, const int16_t *restrict remainder, int64_t count,
                              float *restrict master) {
    for (int64_t i = 0; i < count; i++)
        master[i] = float_of(((uint32_t)weight[i] << 16) + (uint32_t)(int32_t)remainder[i]);
}
