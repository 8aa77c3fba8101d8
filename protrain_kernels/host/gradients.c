/* Kernels for gradients: sums of squares, flattening and accumulation. */

#include "floats.h"

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

/* Rounds to nearest, ties to even, as torch casts. */
static inline void narrow_brains(const float *restrict values, int64_t count, uint16_t *restrict target) {
    for (int64_t i = 0; i < count; i++) target[i] = (uint16_t)(round_brain(values[i]) >> 16);
}

/* Lane i adds lane i + 512, then lane i + 256, and so on. No number of threads or vector width changes that order. */
static float lane_tree(float *lanes) {
    for (int width = LANES / 2; width > 0; width /= 2) {
        float *restrict low = lanes;
        const float *restrict high = lanes + width;
        for (int i = 0; i < width; i++) low[i] = low[i] + high[i];
    }
    return lanes[0];
}

/* Of the finished gradient of weights of weight_dtype. */
void protrain_sum_of_squares(const void *values, int dtype, int64_t count, int weight_dtype, float factor,
                             float *partials, int threads) {
    const int64_t tiles = (count + TILE - 1) / TILE;
#pragma omp parallel for schedule(dynamic, TILES_OF_RUN) num_threads(sharing(count, threads))
    for (int64_t tile = 0; tile < tiles; tile++) {
        float lanes[LANES] = {0}, row[LANES];
        const int64_t end = MIN(count, (tile + 1) * TILE);
        for (int64_t first = tile * TILE; first < end; first += LANES) {
            const int64_t n = MIN(LANES, end - first);
            add_squares(lanes, finished(values, dtype, weight_dtype, factor, first, n, row), n);
        }
        partials[tile] = lane_tree(lanes);
    }
}

/* chunk points to where this tensor starts. Zeros pad it to a multiple of PADDING. partials may be NULL, and accumulate
   needs an fp32 chunk, whose values are rounded to weight_dtype for the partials. */
void protrain_flatten(const void *source, int source_dtype, void *chunk, int chunk_dtype, int64_t count,
                      float *partials, int weight_dtype, int accumulate, int threads) {
    const int64_t tiles = (count + TILE - 1) / TILE;
    const size_t chunk_itemsize = chunk_dtype == FP32 ? 4 : 2;
    const int copies = source_dtype == chunk_dtype && chunk_dtype != FP32;
#pragma omp parallel for schedule(dynamic, TILES_OF_RUN) num_threads(sharing(count, threads))
    for (int64_t tile = 0; tile < tiles; tile++) {
        float lanes[LANES] = {0}, row[LANES];
        const int64_t end = MIN(count, (tile + 1) * TILE);
        for (int64_t first = tile * TILE; first < end; first += LANES) {
            const int64_t n = MIN(LANES, end - first);
            const float *own = widened(source, source_dtype, first, n, row);
            if (chunk_dtype == FP32) {
                float *target = (float *)chunk + first;
                if (accumulate)
                    add_block(target, own, n);
                else
                    copy_block(target, own, n);
                own = finished(target, FP32, weight_dtype, 1.0f, 0, n, row);
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
        }
        if (partials) partials[tile] = lane_tree(lanes);
    }
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
