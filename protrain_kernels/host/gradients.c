/* Kernels for gradients: flattening and folding, with sums of squares. */

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

static inline void scale_block(float *restrict target, const float *restrict values, float factor, int64_t count) {
    for (int64_t i = 0; i < count; i++) target[i] = values[i] * factor;
}

/* Writes the values to the target, rounded to its type. Returns what the target then holds in fp32: the target itself
   where it is fp32, or else a copy in buffer. The values may lie in buffer. */
static const float *stored(const float *values, int64_t count, void *target, int dtype, int64_t first, float *buffer) {
    if (dtype == FP32) {
        copy_block((float *)target + first, values, count);
        return (const float *)target + first;
    }
    if (dtype == BF16)
        narrow_brains(values, count, (uint16_t *)target + first);
    else
        narrow_halves(values, count, (uint16_t *)target + first);
    widen(target, dtype, first, count, buffer);
    return buffer;
}

/* Zeros from element count on, up to a multiple of PADDING. */
static void zero_padding(void *target, int dtype, int64_t count) {
    const int64_t padded = (count + PADDING - 1) / PADDING * PADDING;
    const size_t itemsize = dtype == FP32 ? 4 : 2;
    memset((char *)target + (size_t)count * itemsize, 0, (size_t)(padded - count) * itemsize);
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

/* chunk points to where this tensor starts. Zeros pad it to a multiple of PADDING. A source that is the chunk itself is
   only summed up. */
static void flatten_one(const void *source, int source_dtype, void *chunk, int chunk_dtype, int64_t count,
                        float *partials, int weight_dtype, int accumulate, int threads) {
    const int64_t tiles = (count + TILE - 1) / TILE;
    const int copies = source_dtype == chunk_dtype && chunk_dtype != FP32, moves = source != chunk;
#pragma omp parallel for schedule(dynamic, TILES_OF_RUN) num_threads(sharing(count, threads))
    for (int64_t tile = 0; tile < tiles; tile++) {
        float lanes[LANES] = {0}, row[LANES];
        const int64_t end = MIN(count, (tile + 1) * TILE);
        for (int64_t first = tile * TILE; first < end; first += LANES) {
            const int64_t n = MIN(LANES, end - first);
            const float *own = widened(source, source_dtype, first, n, row);
            if (accumulate) {
                add_block((float *)chunk + first, own, n);
                own = (const float *)chunk + first;
            } else if (moves && copies) {
                copy_halves((uint16_t *)chunk + first, (const uint16_t *)source + first, n);
            } else if (moves) {
                own = stored(own, n, chunk, chunk_dtype, first, row);
            }
            if (chunk_dtype == FP32) own = finished(own, FP32, weight_dtype, 1.0f, 0, n, row);
            if (partials) add_squares(lanes, own, n);
        }
        if (partials) partials[tile] = lane_tree(lanes);
    }
    zero_padding(chunk, chunk_dtype, count);
}

/* A row describes a tensor as slices.py says: it starts at row[0] in the chunk, and its partials start at row[4].
   partials may be NULL, and accumulate needs an fp32 chunk, whose values are rounded to weight_dtype for the partials. */
void protrain_flatten(int64_t tensors, const void *const *sources, int source_dtype, const int64_t (*rows)[6],
                      void *chunk, int chunk_dtype, float *partials, int weight_dtype, int accumulate, int threads) {
    const int64_t itemsize = chunk_dtype == FP32 ? 4 : 2;
    for (int64_t i = 0; i < tensors; i++)
        flatten_one(sources[i], source_dtype, (char *)chunk + rows[i][0] * itemsize, chunk_dtype, rows[i][2],
                    partials ? partials + rows[i][4] : NULL, weight_dtype, accumulate, threads);
}

/* Folds one slice. Element e of its parameter is element e - first + offset of the range, and the piece of rank w begins
   at element w * stride. gradient, accumulator and partials may be NULL. partials points to those of the parameter. */
void protrain_fold(const void *pieces, int dtype, int64_t ranks, int64_t stride, void *gradient, int gradient_dtype,
                   float *accumulator, float factor, int64_t offset, int64_t count, int64_t first,
                   int64_t parameter_count, float *partials, int threads) {
    const int64_t stop = first + count, shift = offset - first;
#pragma omp parallel for schedule(dynamic, TILES_OF_RUN) num_threads(sharing(count, threads))
    for (int64_t tile = first / TILE; tile < (stop + TILE - 1) / TILE; tile++) {
        float lanes[LANES] = {0}, row[LANES], sum[LANES];
        const int64_t begin = MAX(first, tile * TILE), end = MIN(stop, (tile + 1) * TILE);
        for (int64_t from = begin; from < end; from += LANES) {
            const int64_t n = MIN(LANES, end - from), place = shift + from;
            float *total = accumulator ? accumulator + place : sum;
            if (accumulator)
                add_block(total, widened(pieces, dtype, place, n, row), n);
            else
                widen(pieces, dtype, place, n, total);
            for (int64_t rank = 1; rank < ranks; rank++)
                add_block(total, widened(pieces, dtype, rank * stride + place, n, row), n);
            if (!gradient) continue;
            scale_block(row, total, factor, n);
            const float *held = stored(row, n, gradient, gradient_dtype, place, row);
            if (partials) add_squares(lanes, held, n);
        }
        /* A tile that the slice cuts has no partial, and only the rows of whole tiles begin at a multiple of LANES. */
        const int whole = tile * TILE >= first && MIN(parameter_count, (tile + 1) * TILE) <= stop;
        if (partials && whole) partials[tile] = lane_tree(lanes);
    }
    if (gradient) zero_padding(gradient, gradient_dtype, offset + count);
    if (accumulator) zero_padding(accumulator, FP32, offset + count);
}
