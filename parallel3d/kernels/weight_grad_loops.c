/* Gradients of weights by AMX: total (out, in) += grad^T x for bf16 grad (tokens, out) and x (tokens, in), straight into
   sums in fp32. Two tokens that follow each other are one element of a product's factors, so both are packed:

       grad   32 of its columns at a time, turned     rows of a left factor, for each thread
       x      panels of 32 columns, tokens in pairs   the right factor, once for all threads

   A number of the total is one sum over the tokens in order, so its bits do not depend on the number of threads. */

#include <omp.h>

#include "lanes.h"

#ifdef __AMX_BF16__
#include "tiles.h"
#include "wide_lanes.h"

#define SIDE 32 /* columns of each factor at a time: two tiles */

int64_t has_tiles(void) { return may_use_tiles(); }

/* The first of 16 columns, as many as there are: a bit for each. */
INLINE __mmask16 some_columns(int64_t columns) {
    return columns >= LANES ? 0xffff : columns > 0 ? (1 << columns) - 1 : 0;
}

/* 16 columns of the tokens `first` and `first + 1`, as pairs; zeros where there is no token or no column. */
INLINE __m512i pair_at(const uint16_t *x, int64_t stride, int64_t first, int64_t tokens, __mmask16 columns) {
    __m512i found = _mm512_setzero_si512();
    if (first < tokens) found = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(columns, x + first * stride));
    if (first + 1 < tokens) {
        __m512i next = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(columns, x + (first + 1) * stride));
        found = _mm512_or_si512(found, _mm512_slli_epi32(next, 16));
    }
    return found;
}

/* x (tokens, columns), `stride` numbers apart, -> pairs (steps, 32). */
INLINE void pack_panel(const uint16_t *x, int64_t stride, uint32_t *out, int64_t tokens, int64_t steps, int64_t columns) {
    __mmask16 there[2] = {some_columns(columns), some_columns(columns - LANES)};
    for (int64_t s = 0; s < steps; s++)
        for (int64_t half = 0; half < 2; half++)
            _mm512_storeu_si512(out + s * SIDE + half * LANES,
                                pair_at(x + half * LANES, stride, 2 * s, tokens, there[half]));
}

/* The same, turned: (32, steps). */
INLINE void pack_turned(const uint16_t *x, int64_t stride, uint32_t *out, int64_t tokens, int64_t steps,
                        int64_t columns) {
    __mmask16 there[2] = {some_columns(columns), some_columns(columns - LANES)};
    uint32_t pairs[LANES * LANES];
    for (int64_t s = 0; s < steps; s += LANES)
        for (int64_t half = 0; half < 2; half++) {
            for (int64_t i = 0; i < LANES; i++)
                _mm512_storeu_si512(pairs + i * LANES,
                                    pair_at(x + half * LANES, stride, 2 * (s + i), tokens, there[half]));
            turn(pairs, LANES, out + half * LANES * steps + s, steps);
        }
}

/* multiply_tiles at an edge of `out`, where it has fewer than 32 rows or columns. */
static void multiply_edge(const uint32_t *a, const uint32_t *b, float *out, int64_t out_row, int64_t steps, int adds,
                          int64_t rows, int64_t columns) {
    float block[SIDE * SIDE] = {0};
    for (int64_t r = 0; adds && r < rows; r++)
        for (int64_t c = 0; c < columns; c++) block[r * SIDE + c] = out[r * out_row + c];
    BARRIER;
    multiply_tiles(a, steps, b, SIDE, block, SIDE, steps, adds);
    BARRIER;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c++) out[r * out_row + c] = block[r * SIDE + c];
}

/* `space` has `chunk` / 2 elements for each column of x, their number rounded up to a multiple of 32, and for 32 columns of
   grad and each thread; tokens are taken `chunk` at a time, a multiple of 32. */
void add_weight_grad(float *total, const uint16_t *grad, int64_t grad_stride, const uint16_t *x, int64_t x_stride,
                     uint32_t *space, int64_t chunk, int64_t tokens, int64_t num_out, int64_t num_in, int64_t overwrite,
                     int64_t threads) {
#pragma omp parallel num_threads((int)threads)
    {
        int64_t panels = (num_in + SIDE - 1) / SIDE;
        uint32_t *own = space + chunk / 2 * SIDE * (panels + omp_get_thread_num());
        Tiles before = begin_tiles();
        for (int64_t first = 0; first < tokens; first += chunk) {
            int64_t some = tokens - first < chunk ? tokens - first : chunk, steps = (some + 2 * LANES - 1) / (2 * LANES) * LANES;
            int adds = !overwrite || first;
#pragma omp for schedule(static)
            for (int64_t column = 0; column < num_in; column += SIDE)
                pack_panel(x + first * x_stride + column, x_stride, space + column * steps, some, steps, num_in - column);
#pragma omp for schedule(static)
            for (int64_t row = 0; row < num_out; row += SIDE) {
                pack_turned(grad + first * grad_stride + row, grad_stride, own, some, steps, num_out - row);
                BARRIER;
                for (int64_t column = 0; column < num_in; column += SIDE) {
                    int64_t rows = num_out - row, columns = num_in - column;
                    float *out = total + row * num_in + column;
                    if (rows >= SIDE && columns >= SIDE)
                        multiply_tiles(own, steps, space + column * steps, SIDE, out, num_in, steps, adds);
                    else
                        multiply_edge(own, space + column * steps, out, num_in, steps, adds, rows < SIDE ? rows : SIDE,
                                      columns < SIDE ? columns : SIDE);
                }
                BARRIER;
            }
        }
        end_tiles(&before);
    }
}
#else
int64_t has_tiles(void) { return 0; }
#endif
