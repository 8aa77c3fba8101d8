/* Sums of squares, in the order that rounding.py states. */

#include "floats.h"

static inline void add_squares(float *restrict lanes, const float *restrict values, int64_t count) {
    for (int64_t i = 0; i < count; i++) lanes[i] = lanes[i] + values[i] * values[i];
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

/* Writes a partial for every started tile of the values. Those in fp32 are rounded to weight_dtype before that. */
void protrain_sum_of_squares(const void *values, int dtype, int64_t count, int weight_dtype, float *partials,
                             int threads) {
    const int64_t tiles = (count + TILE - 1) / TILE;
#pragma omp parallel for schedule(dynamic, TILES_OF_RUN) num_threads(sharing(count, threads))
    for (int64_t tile = 0; tile < tiles; tile++) {
        float lanes[LANES] = {0}, row[LANES];
        const int64_t end = MIN(count, (tile + 1) * TILE);
        for (int64_t first = tile * TILE; first < end; first += LANES) {
            const int64_t n = MIN(LANES, end - first);
            add_squares(lanes, finished(values, dtype, weight_dtype, 1.0f, first, n, row), n);
        }
        partials[tile] = lane_tree(lanes);
    }
}
