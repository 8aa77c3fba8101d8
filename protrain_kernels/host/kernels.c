/* Host kernels of protrain_kernels: the same arithmetic as the Triton kernels, bit for bit.

   Every function cuts its range in blocks that fit the L1 cache, widens a block to fp32, computes in fp32 with separate
   multiplies and adds (build with -ffp-contract=off, never with -ffast-math), and narrows the result. The loops over a
   block have no branches and no aliases, so compilers vectorise them. Threads take runs of blocks as they get to them:
   with equal shares for all, every call would last as long as the thread whose core is also the launching thread's. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__F16C__) || defined(__AVX__)
#include <immintrin.h>
#endif

enum { BF16 = 0, FP16 = 1, FP32 = 2 };
enum { BLOCK = 512, PART = 128, LANES = 1024, ROWS = 16, TILE = LANES * ROWS, PADDING = 128 };
/* PART: a block for a loop that also writes around the cache, which takes few streams at once well. */
enum { RUN = 32768, BLOCKS_OF_RUN = RUN / BLOCK, TILES_OF_RUN = RUN / TILE }; /* elements taken at a time */
#define MIN(a, b) ((a) < (b) ? (a) : (b))

/* What fits one run is done by the calling thread: waking others takes longer, and far longer where other processes
   have the cores. More runs than that are for all of them, since OpenMP ends and starts threads as a team's size varies. */
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

/* ---- 16-bit floats ---- */

static inline float widen_half(uint16_t half) {
    const uint32_t infinity = 0x7c00u << 13;
    uint32_t bits = (uint32_t)(half & 0x7fffu) << 13;
    const uint32_t exponent = bits & infinity;
    bits += (127u - 15u) << 23;
    bits += exponent == infinity ? (128u - 16u) << 23 : 0u;
    /* A subnormal half is a normal fp32: borrow an exponent and subtract the implicit one, which is exact. */
    const uint32_t subnormal = bits_of(float_of(bits + (1u << 23)) - float_of(113u << 23));
    bits = exponent == 0 ? subnormal : bits;
    return float_of(bits | (uint32_t)(half & 0x8000u) << 16);
}

static inline uint16_t narrow_half(float value) {
    uint32_t bits = bits_of(value);
    const uint32_t sign = bits & 0x80000000u;
    const uint32_t magic = (127u - 15u + 23u - 10u + 1u) << 23;
    bits ^= sign;
    /* Adding the magic number lets the fp32 adder round to a multiple of the smallest half, ties to even. */
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

/* The block as fp32: in place where it is fp32 already, else in buffer. */
static const float *widened(const void *source, int dtype, int64_t first, int64_t count, float *buffer) {
    if (dtype == FP32) return (const float *)source + first;
    widen(source, dtype, first, count, buffer);
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

void protrain_split(const float *master, uint16_t *weight, int16_t *remainder, int64_t count, int threads) {
    const int64_t blocks = (count + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(dynamic, BLOCKS_OF_RUN) num_threads(sharing(count, threads))
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t first = block * BLOCK;
        split_block(master + first, MIN(BLOCK, count - first), weight + first, remainder + first);
    }
}

void protrain_join(const uint16_t *weight, const int16_t *remainder, float *master, int64_t count, int threads) {
    const int64_t blocks = (count + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(dynamic, BLOCKS_OF_RUN) num_threads(sharing(count, threads))
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t first = block * BLOCK;
        join_block(weight + first, remainder + first, MIN(BLOCK, count - first), master + first);
    }
}

/* ---- Adam ---- */

typedef struct {
    float decay, l2, beta1, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_bias_correction2, eps, step_size, step;
    float scale;
} adam_scalars;

/* One element: p in fp32, its gradient, and both moments, which it returns by their pointers. */
static inline float adam_element(float p, float g, float *restrict m, float *restrict v, const adam_scalars s,
                                 const int l2) {
    g = g * s.scale;
    if (l2) g = g + p * s.l2;
    p = p * s.decay;
    *m = *m * s.beta1 + g * s.one_minus_beta1;
    *v = *v * s.beta2 + (g * g) * s.one_minus_beta2;
    const float denominator = sqrtf(*v) * s.inv_sqrt_bias_correction2 + s.eps;
    return p - (*m / denominator) * s.step_size;
}

static inline void adam_block(float *restrict weight, const float *restrict grad, float *restrict exp_avg,
                              float *restrict exp_avg_sq, int64_t count, const adam_scalars s, const int l2) {
    for (int64_t i = 0; i < count; i++) {
        float m = exp_avg[i], v = exp_avg_sq[i];
        weight[i] = adam_element(weight[i], grad[i], &m, &v, s, l2);
        exp_avg[i] = m;
        exp_avg_sq[i] = v;
    }
}

static inline void adam_block_to(const float *restrict weight, const float *restrict grad,
                                 const float *restrict exp_avg, const float *restrict exp_avg_sq,
                                 float *restrict new_weight, float *restrict new_exp_avg,
                                 float *restrict new_exp_avg_sq, int64_t count, const adam_scalars s, const int l2) {
    for (int64_t i = 0; i < count; i++) {
        float m = exp_avg[i], v = exp_avg_sq[i];
        new_weight[i] = adam_element(weight[i], grad[i], &m, &v, s, l2);
        new_exp_avg[i] = m;
        new_exp_avg_sq[i] = v;
    }
}

static inline uint16_t upper_half(uint32_t bits, uint32_t random) {
    const uint32_t magnitude = bits & 0x7fffffffu, sum = bits + random; /* added in any case: gcc vectorises that */
    const uint32_t special = magnitude > 0x7f800000u ? 0x7fc00000u : bits;
    return (uint16_t)((magnitude < 0x7f7f0000u ? sum : special) >> 16);
}

static inline uint32_t zero_for_nan(uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u ? 0u : bits; }

/* fp32 moments to bf16, up or down at random: the formula and the bits of stochastic_rounding.py. */
static void round_moments(const float *restrict exp_avg, const float *restrict exp_avg_sq, int64_t count, float step,
                          uint16_t *restrict new_exp_avg, uint16_t *restrict new_exp_avg_sq) {
    const uint32_t seed = bits_of(step) * 0x85ebca6bu;
    for (int64_t i = 0; i < count; i++) {
        const uint32_t m = bits_of(exp_avg[i]), v = bits_of(exp_avg_sq[i]);
        uint32_t x = zero_for_nan(m) * 0x9e3779b1u + zero_for_nan(v) + seed;
        x = (x ^ (x >> 16)) * 0x7feb352du;
        x = (x ^ (x >> 15)) * 0x846ca68bu;
        x = x ^ (x >> 16);
        new_exp_avg[i] = upper_half(m, x & 0xffffu);
        new_exp_avg_sq[i] = upper_half(v, x >> 16);
    }
}

/* master: int16 remainders for a bf16 weight, fp32 for an fp16 weight, unused for an fp32 weight. Moments: FP32, BF16. */
void protrain_adam(void *weight, int weight_dtype, void *master, void *exp_avg, void *exp_avg_sq, int moment_dtype,
                   const void *grad, int grad_dtype, int64_t count, const adam_scalars *scalars, int threads) {
    const adam_scalars s = *scalars;
    const int64_t blocks = (count + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(dynamic, BLOCKS_OF_RUN) num_threads(sharing(count, threads))
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t first = block * BLOCK, n = MIN(BLOCK, count - first);
        float joined[BLOCK], buffer[BLOCK], wide_m[BLOCK], wide_v[BLOCK];
        float *m = wide_m, *v = wide_v;
        if (moment_dtype == FP32) {
            m = (float *)exp_avg + first;
            v = (float *)exp_avg_sq + first;
        } else {
            widen(exp_avg, moment_dtype, first, n, m);
            widen(exp_avg_sq, moment_dtype, first, n, v);
        }
        float *p = weight_dtype == FP32 ? (float *)weight + first : (float *)master + first;
        if (weight_dtype == BF16) {
            p = joined;
            join_block((uint16_t *)weight + first, (int16_t *)master + first, n, p);
        }
        const float *g = widened(grad, grad_dtype, first, n, buffer);
        if (s.l2 != 0.0f)
            adam_block(p, g, m, v, n, s, 1);
        else
            adam_block(p, g, m, v, n, s, 0);
        if (moment_dtype == BF16)
            round_moments(m, v, n, s.step, (uint16_t *)exp_avg + first, (uint16_t *)exp_avg_sq + first);
        if (weight_dtype == BF16) split_block(p, n, (uint16_t *)weight + first, (int16_t *)master + first);
        if (weight_dtype == FP16) narrow_halves(p, n, (uint16_t *)weight + first);
    }
}

/* Around the cache, which would read from memory first what is overwritten as a whole. */
static inline void write_out(void *target, const void *source, int64_t bytes) {
    int64_t done = 0;
#if defined(__AVX512F__)
    if (((uintptr_t)target & 63) == 0)
        for (; done + 64 <= bytes; done += 64)
            _mm512_stream_si512((__m512i *)((char *)target + done), _mm512_loadu_si512((const char *)source + done));
#elif defined(__AVX__)
    if (((uintptr_t)target & 31) == 0)
        for (; done + 32 <= bytes; done += 32)
            _mm256_stream_si256((__m256i *)((char *)target + done),
                                _mm256_loadu_si256((const __m256i *)((const char *)source + done)));
#endif
    memcpy((char *)target + done, (const char *)source + done, (size_t)(bytes - done));
}

/* Other threads must not see later stores before those of write_out. */
static inline void written_out(void) {
#if defined(__AVX__)
    _mm_sfence();
#endif
}

/* protrain_adam that leaves its states as they are and writes the new ones elsewhere, where there is anywhere: as much
 * traffic, or that of the weight alone. */
void protrain_adam_out_of_place(const void *weight, int weight_dtype, const void *master, const void *exp_avg,
                                const void *exp_avg_sq, int moment_dtype, const void *grad, int grad_dtype,
                                int64_t count, const adam_scalars *scalars, int threads, void *new_weight,
                                void *new_master, void *new_exp_avg, void *new_exp_avg_sq) {
    const adam_scalars s = *scalars;
    const int64_t blocks = (count + PART - 1) / PART;
#pragma omp parallel num_threads(sharing(count, threads))
    {
#pragma omp for schedule(dynamic, RUN / PART) nowait
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t first = block * PART, n = MIN(PART, count - first);
            float joined[PART], buffer[PART], wide_m[PART], wide_v[PART], p[PART], m[PART], v[PART];
            uint16_t half[PART], half_m[PART], half_v[PART];
            int16_t remainder[PART];
            const float *old = (const float *)(weight_dtype == FP32 ? weight : master) + first;
            if (weight_dtype == BF16) {
                join_block((const uint16_t *)weight + first, (const int16_t *)master + first, n, joined);
                old = joined;
            }
            const float *g = widened(grad, grad_dtype, first, n, buffer);
            const float *old_m = widened(exp_avg, moment_dtype, first, n, wide_m);
            const float *old_v = widened(exp_avg_sq, moment_dtype, first, n, wide_v);
            if (s.l2 != 0.0f)
                adam_block_to(old, g, old_m, old_v, p, m, v, n, s, 1);
            else
                adam_block_to(old, g, old_m, old_v, p, m, v, n, s, 0);
            if (new_exp_avg && moment_dtype == FP32) {
                write_out((float *)new_exp_avg + first, m, n * 4);
                write_out((float *)new_exp_avg_sq + first, v, n * 4);
            } else if (new_exp_avg) {
                round_moments(m, v, n, s.step, half_m, half_v);
                write_out((uint16_t *)new_exp_avg + first, half_m, n * 2);
                write_out((uint16_t *)new_exp_avg_sq + first, half_v, n * 2);
            }
            if (weight_dtype == FP32) {
                write_out((float *)new_weight + first, p, n * 4);
                continue;
            }
            if (weight_dtype == BF16) {
                split_block(p, n, half, remainder);
                if (new_master) write_out((int16_t *)new_master + first, remainder, n * 2);
            } else {
                narrow_halves(p, n, half);
                if (new_master) write_out((float *)new_master + first, p, n * 4);
            }
            write_out((uint16_t *)new_weight + first, half, n * 2);
        }
        written_out();
    }
}

/* ---- gradients ---- */

static inline void add_squares(float *restrict lanes, const float *restrict values, int64_t count) {
    for (int64_t i = 0; i < count; i++) lanes[i] = lanes[i] + values[i] * values[i];
}

static inline void add_block(float *restrict total, const float *restrict values, int64_t count) {
    for (int64_t i = 0; i < count; i++) total[i] = total[i] + values[i];
}

static inline void copy_block(float *restrict target, const float *restrict values, int64_t count) {
    for (int64_t i = 0; i < count; i++) target[i] = values[i];
}

static inline void copy_halves(uint16_t *restrict target, const uint16_t *restrict halves, int64_t count) {
    for (int64_t i = 0; i < count; i++) target[i] = halves[i];
}

static inline void scale_block(float *restrict target, const float *restrict values, int64_t count, float scale) {
    for (int64_t i = 0; i < count; i++) target[i] = values[i] * scale;
}

/* To nearest, ties to even, as torch casts. */
static inline void narrow_brains(const float *restrict values, int64_t count, uint16_t *restrict target) {
    for (int64_t i = 0; i < count; i++) {
        const uint32_t bits = bits_of(values[i]);
        const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        target[i] = (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
    }
}

static inline uint32_t largest_bits(const float *restrict values, int64_t count) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        const uint32_t bits = bits_of(values[i]) & 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

/* Lane i takes in lane i + 512, then i + 256, ... : an order that no thread count or vector width changes. */
static float lane_tree(float *lanes) {
    for (int width = LANES / 2; width > 0; width /= 2) {
        float *restrict low = lanes;
        const float *restrict high = lanes + width;
        for (int i = 0; i < width; i++) low[i] = low[i] + high[i];
    }
    return lanes[0];
}

void protrain_sum_of_squares(const void *values, int dtype, int64_t count, float *partials, int threads) {
    const int64_t tiles = (count + TILE - 1) / TILE;
#pragma omp parallel for schedule(dynamic, TILES_OF_RUN) num_threads(sharing(count, threads))
    for (int64_t tile = 0; tile < tiles; tile++) {
        float lanes[LANES] = {0}, row[LANES];
        const int64_t end = MIN(count, (tile + 1) * TILE);
        for (int64_t first = tile * TILE; first < end; first += LANES) {
            const int64_t n = MIN(LANES, end - first);
            add_squares(lanes, widened(values, dtype, first, n, row), n);
        }
        partials[tile] = lane_tree(lanes);
    }
}

/* chunk: where this tensor starts. Pads with zeros to a multiple of PADDING. partials, scale and nonfinite may be NULL;
   accumulate needs an fp32 chunk. */
void protrain_flatten(const void *source, int source_dtype, void *chunk, int chunk_dtype, int64_t count,
                      float *partials, int accumulate, const float *scale, int32_t *nonfinite, int threads) {
    const int64_t tiles = (count + TILE - 1) / TILE;
    const size_t chunk_itemsize = chunk_dtype == FP32 ? 4 : 2;
    const int copies = source_dtype == chunk_dtype && chunk_dtype != FP32 && !scale;
    int bad = 0;
#pragma omp parallel for schedule(dynamic, TILES_OF_RUN) num_threads(sharing(count, threads)) reduction(| : bad)
    for (int64_t tile = 0; tile < tiles; tile++) {
        float lanes[LANES] = {0}, row[LANES];
        uint32_t largest = 0;
        const int64_t end = MIN(count, (tile + 1) * TILE);
        for (int64_t first = tile * TILE; first < end; first += LANES) {
            const int64_t n = MIN(LANES, end - first);
            const float *own = widened(source, source_dtype, first, n, row);
            if (scale) {
                scale_block(row, own, n, *scale);
                own = row;
            }
            if (chunk_dtype == FP32) {
                float *target = (float *)chunk + first;
                if (accumulate)
                    add_block(target, own, n);
                else
                    copy_block(target, own, n);
                own = target;
            } else if (copies) {
                copy_halves((uint16_t *)chunk + first, (const uint16_t *)source + first, n);
            } else {
                if (chunk_dtype == BF16)
                    narrow_brains(own, n, (uint16_t *)chunk + first);
                else
                    narrow_halves(own, n, (uint16_t *)chunk + first);
                widen(chunk, chunk_dtype, first, n, row);
                own = row;
            }
            if (partials) add_squares(lanes, own, n);
            if (nonfinite) {
                const uint32_t most = largest_bits(own, n);
                largest = most > largest ? most : largest;
            }
        }
        if (partials) partials[tile] = lane_tree(lanes);
        bad |= largest >= 0x7f800000u;
    }
    if (bad) *nonfinite = 1;
    const int64_t padded = (count + PADDING - 1) / PADDING * PADDING;
    memset((char *)chunk + (size_t)count * chunk_itemsize, 0, (size_t)(padded - count) * chunk_itemsize);
}

void protrain_accumulate(float *total, const void *grad, int dtype, int64_t count, int initialise, int threads) {
    const int64_t blocks = (count + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(dynamic, BLOCKS_OF_RUN) num_threads(sharing(count, threads))
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t first = block * BLOCK, n = MIN(BLOCK, count - first);
        float buffer[BLOCK];
        if (initialise)
            widen(grad, dtype, first, n, total + first);
        else
            add_block(total + first, widened(grad, dtype, first, n, buffer), n);
    }
}
