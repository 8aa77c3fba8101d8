/* Adam in place and out of place. */

#include "adam.h"
#include "adam_pairs.h"

/* master holds int16 remainders for a bf16 weight and fp32 for an fp16 weight. It is unused for an fp32 weight.
   moment_dtype is FP32 or BF16. */
void protrain_adam(void *weight, int weight_dtype, void *master, void *exp_avg, void *exp_avg_sq, int moment_dtype,
                   const void *grad, int grad_dtype, int64_t count, const adam_scalars *scalars, int threads) {
    const adam_scalars s = *scalars;
    const int64_t blocks = (count + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(dynamic, BLOCKS_OF_RUN) num_threads(sharing(count, threads))
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t first = block * BLOCK, n = MIN(BLOCK, count - first);
        pair_block new;
        if (adam_pairs(weight, weight_dtype, master, exp_avg, exp_avg_sq, moment_dtype, grad, grad_dtype, first, n, s,
                       &new)) {
            copy_pairs((uint16_t *)weight + first, new.weight, n / 2);
            copy_pairs((int16_t *)master + first, new.remainder, n / 2);
            copy_pairs((uint16_t *)exp_avg + first, new.exp_avg, n / 2);
            copy_pairs((uint16_t *)exp_avg_sq + first, new.exp_avg_sq, n / 2);
            continue;
        }
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
        const float *g = finished(grad, grad_dtype, weight_dtype, s.gradient_factor, first, n, buffer);
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

/* Writes around the cache, which would first read from memory what is overwritten as a whole. */
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

/* Orders the stores of write_out before later stores, as other threads see them. */
static inline void written_out(void) {
#if defined(__AVX__)
    _mm_sfence();
#endif
}

/* protrain_adam out of place: it leaves the old states as they are and writes the new ones elsewhere. new_master, or
   both new moments, may be NULL where they are not wanted. */
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
            pair_block new;
            if (new_exp_avg && adam_pairs(weight, weight_dtype, master, exp_avg, exp_avg_sq, moment_dtype, grad,
                                          grad_dtype, first, n, s, &new)) {
                write_out((uint16_t *)new_weight + first, new.weight, n * 2);
                write_out((int16_t *)new_master + first, new.remainder, n * 2);
                write_out((uint16_t *)new_exp_avg + first, new.exp_avg, n * 2);
                write_out((uint16_t *)new_exp_avg_sq + first, new.exp_avg_sq, n * 2);
                continue;
            }
            float joined[PART], buffer[PART], wide_m[PART], wide_v[PART], p[PART], m[PART], v[PART];
            uint16_t half[PART], half_m[PART], half_v[PART];
            int16_t remainder[PART];
            const float *old = (const float *)(weight_dtype == FP32 ? weight : master) + first;
            if (weight_dtype == BF16) {
                join_block((const uint16_t *)weight + first, (const int16_t *)master + first, n, joined);
                old = joined;
            }
            const float *g = finished(grad, grad_dtype, weight_dtype, s.gradient_factor, first, n, buffer);
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
