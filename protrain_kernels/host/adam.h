/* Adam on blocks in fp32, and the rounding of its moments to bf16. */

#pragma once

#include "floats.h"

typedef struct {
    float decay, l2, beta1, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_bias_correction2, eps, step_size, step;
    float gradient_factor, scale;
} adam_scalars;

/* Updates one element: returns the new parameter in fp32 and writes both moments through their pointers. */
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
    const uint32_t magnitude = bits & 0x7fffffffu, sum = bits + random; /* always added, as gcc vectorises that */
    const uint32_t special = magnitude > 0x7f800000u ? 0x7fc00000u : bits;
    return (uint16_t)((magnitude < 0x7f7f0000u ? sum : special) >> 16);
}

static inline uint32_t zero_for_nan(uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u ? 0u : bits; }

static inline uint32_t seed_of(float step) { return bits_of(step) * 0x85ebca6bu; }

/* 16 random bits for the rounding of either moment, by the formula of stochastic_rounding.py. */
static inline uint32_t random_of(uint32_t exp_avg, uint32_t exp_avg_sq, uint32_t seed) {
    uint32_t x = exp_avg * 0x9e3779b1u + exp_avg_sq + seed;
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

/* Rounds fp32 moments to bf16, up or down at random. */
static inline void round_moments(const float *restrict exp_avg, const float *restrict exp_avg_sq, int64_t count,
                                 float step, uint16_t *restrict new_exp_avg, uint16_t *restrict new_exp_avg_sq) {
    const uint32_t seed = seed_of(step);
    for (int64_t i = 0; i < count; i++) {
        const uint32_t m = bits_of(exp_avg[i]), v = bits_of(exp_avg_sq[i]);
        const uint32_t random = random_of(zero_for_nan(m), zero_for_nan(v), seed);
        new_exp_avg[i] = upper_half(m, random & 0xffffu);
        new_exp_avg_sq[i] = upper_half(v, random >> 16);
    }
}
