/* Gradients of weights by AMX: total (out, in) += grad^T x for bf16 grad (tokens, out) and x (tokens, in), straight into
   sums in fp32. Two tokens that follow each other are one element of a product's factors, so both are packed:

       grad   32 of its columns at a time, turned     rows of a left factor, for each thread
       x      panels of 32 columns, tokens in pairs   the right factor, once for all threads

   A number of the total is one sum over the tokens in order, so its bits do not depend on the number of threads. */

#include <omp.h>

#include "lanes.h"

#ifdef __AMX_BF16__
#include "tiles.h"

#define SIDE 32 /* columns of each factor at a time: two tiles */

int64_t has_tiles(void) { return may_use_tiles(); }

/* 16 columns of the tokens `first` and `first + 1`, as pairs. */
INLINE __m512i pair_at(const uint16_t *x, int64_t stride, int64_t first, int64_t tokens) {
    __m512i found = _mm512_setzero_si512();
    if (first < tokens) found = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(x + first * stride)));
    if (first + 1 < tokens) {
        __m512i next = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(x + (first + 1) * stride)));
        found = _mm512_or_si512(found, _mm512_slli_epi32(next, 16));
    }
    return found;
}

/* x (tokens, 32), `stride` numbers apart, -> pairs (steps, 32). */
INLINE void pack_panel(const uint16_t *x, int64_t stride, uint32_t *out, int64_t tokens, int64_t steps) {
    for (int64_t s = 0; s < steps; s++)
        for (int64_t half = 0; half < SIDE; half += LANES)
            _mm512_storeu_si512(out + s * SIDE + half, pair_at(x + half, stride, 2 * s, tokens));
}

/* The same, turned: (32, steps). */
INLINE void pack_turned(const uint16_t *x, int64_t stride, uint32_t *out, int64_t tokens, int64_t steps) {
    uint32_t pairs[LANES * LANES];
    for (int64_t s = 0; s < steps; s += LANES)
        for (int64_t half = 0; half < SIDE; half += LANES) {
            for (int64_t i = 0; i < LANES; i++)
                _mm512_storeu_si512(pairs + i * LANES, pair_at(x + half, stride, 2 * (s + i), tokens));
            turn(pairs, LANES, out + half * steps + s, steps);
        }
}

/* `space` has `chunk` / 2 elements for each column of x and for 32 columns of grad and each thread; tokens are taken `chunk`
   at a time, a multiple of 32; out and in are multiples of 32. */
void add_weight_grad(float *total, const uint16_t *grad, int64_t grad_stride, const uint16_t *x, int64_t x_stride,
                     uint32_t *space, int64_t chunk, int64_t tokens, int64_t num_out, int64_t num_in, int64_t overwrite,
                     int64_t threads) {
#pragma omp parallel num_threads((int)threads)
    {
        uint32_t *own = space + chunk / 2 * (num_in + SIDE * omp_get_thread_num());
        Tiles before = begin_tiles();
        for (int64_t first = 0; first < tokens; first += chunk) {
            int64_t some = tokens - first < chunk ? tokens - first : chunk, steps = (some + 2 * LANES - 1) / (2 * LANES) * LANES;
            int adds = !overwrite || first;
#pragma omp for schedule(static)
            for (int64_t column = 0; column < num_in; column += SIDE)
                pack_panel(x + first * x_stride + column, x_stride, space + column * steps, some, steps);
#pragma omp for schedule(static)
            for (int64_t row = 0; row < num_out; row += SIDE) {
                pack_turned(grad + first * grad_stride + row, grad_stride, own, some, steps);
                BARRIER;
                for (int64_t column = 0; column < num_in; column += SIDE)
                    multiply_tiles(own, steps, space + column * steps, SIDE, total + row * num_in + column, num_in, steps,
                                   adds);
                BARRIER;
            }
        }
        end_tiles(&before);
    }
}
#else
int64_t has_tiles(void) { return 0; }
#endif
