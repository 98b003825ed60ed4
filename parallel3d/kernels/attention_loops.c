/* Causal attention (torch_attention.py defines it) for processors with AVX-512, or with AVX2 and FMA: fp32,
   and with AVX512 BF16 or AMX products of bf16 factors with results in fp32:

       scores         = rows of q            x  keys in tiles of 64 columns
       mixed          = rows of p            x  values, two keys side by side
       values' grads  = grads, two queries   x  rows of p, two queries side by side      (transposed: size x keys)
       ...            and the same with the gradients of p and of the scores

   A unit (a key-value head of a sequence) belongs to one thread and sums are in order, so the bits do not depend on the
   number of threads. Products are those of the processor, like all other products. */

#include <omp.h>

#include "lanes.h"

#if defined(__AVX512BW__) || (defined(__AVX2__) && defined(__FMA__))
#include "attention_products.h"
#include "attention_softmax.h"

#define UNITS(threads) _Pragma("omp parallel for schedule(dynamic) num_threads((int)threads)")

#ifdef __AMX_BF16__
#define ON_TILES(...)                 \
    do {                              \
        Tiles before = begin_tiles(); \
        __VA_ARGS__;                  \
        end_tiles(&before);           \
    } while (0)
#else
#define ON_TILES(...)
#endif

/* Some of a head's queries, `begin` to `begin + rows`, which see the keys before `end`. Rows of scores are `stride`
   numbers apart, in fp32 and in bf16. */
typedef struct { int64_t begin, rows, end, width, stride; } Block;

INLINE Block block_at(int64_t begin, int64_t length) {
    int64_t rows = length - begin < QUERIES ? length - begin : QUERIES, end = begin + rows;
    return (Block){begin, rows, end, padded_of(end), padded_of(length) + 2 * LANES};
}

/* The left factor that lies in rows: scores' format, `rounded` if it is narrow. */
INLINE Left rows_of_scores(const float *wide, const uint16_t *rounded, Block block, int narrow) {
    return narrow ? (Left){(const uint32_t *)rounded, block.stride / 2, 1} : (Left){(const uint32_t *)wide, block.stride, 1};
}

/* How many steps of a sum over keys there are. */
INLINE int64_t steps_of_keys(Block block, int narrow) {
    return steps_of(narrow == TILES ? block.width : block.end, narrow);
}

/* q (group, length, size), k and v (length, size) -> mixed (length, group, size), a query's `step` numbers apart. */
INLINE void forward_unit(const void *q, const void *k, const void *v, void *mixed, int64_t step, uint32_t *space,
                         int64_t group, int64_t length, int64_t size, float scale, int narrow) {
    int64_t padded = padded_of(length), stride = block_at(0, length).stride, steps = steps_of(size, narrow);
    Right keys = in_tiles(k, take(&space, padded * size), length, steps);
    Right values = pairs_of_unit(v, take(&space, padded * size), length, size, narrow);
    uint32_t *copy = take(&space, QUERIES * size);
    uint16_t *rounded = (uint16_t *)take(&space, QUERIES * stride / 2);
    float *scores = (float *)take(&space, QUERIES * stride), *out = (float *)take(&space, QUERIES * size);
    float shares[QUERIES];
    for (int64_t head = 0; head < group; head++)
        for (int64_t begin = 0; begin < length; begin += QUERIES) {
            Block block = block_at(begin, length);
            int64_t first = (head * length + begin) * size;
            const uint32_t *rows = whole_block(row_of(q, first, narrow), size, copy, block.rows, size, narrow);
            multiply((Left){rows, steps, 1}, keys, scores, stride, QUERIES, block.width, steps, 0, narrow);
            for (int64_t row = 0; row < QUERIES; row++) { /* those from block.rows on are not stored */
                int64_t seen = block.begin + row + 1 < block.width ? block.begin + row + 1 : block.width;
                shares[row] =
                    softmax_powers(scores + row * stride, rounded + row * stride, scale, seen, block.width, narrow);
            }
            multiply(rows_of_scores(scores, rounded, block, narrow), values, out, size, QUERIES, size,
                     steps_of_keys(block, narrow), 0, narrow);
            for (int64_t row = 0; row < block.rows; row++)
                store_rows(out + row * size, row_of(mixed, (begin + row) * step + head * size, narrow), 1, size, shares[row],
                           narrow);
        }
}

/* What a block's backward pass needs beside its unit's factors. */
typedef struct {
    uint32_t *q_copy, *grad_copy, *q_turned, *grad_turned, *pairs, *grad_pairs;
    uint16_t *rounded;
    float *scores, *inner, *out;
} Backward;

INLINE Backward take_backward(uint32_t **space, int64_t size, int64_t stride) {
    int64_t rows = QUERIES * size, half = QUERIES * stride / 2;
    return (Backward){take(space, rows),
                      take(space, rows),
                      take(space, rows),
                      take(space, rows),
                      take(space, half),
                      take(space, half),
                      (uint16_t *)take(space, half),
                      (float *)take(space, 2 * half),
                      (float *)take(space, 2 * half),
                      (float *)take(space, rows)};
}

/* Probabilities and the gradients of scores; those of queries beyond the block's are 0. */
INLINE void softmax_of_block(Backward own, Block block, float scale, int narrow) {
    for (int64_t row = 0; row < QUERIES; row += 2) {
        float share[2] = {0, 0}, inner[2] = {0, 0};
        float *scores = own.scores + row * block.stride, *grads = own.inner + row * block.stride;
        for (int64_t i = 0; i < 2; i++) {
            float *here = scores + i * block.stride, *grad = grads + i * block.stride;
            if (row + i < block.rows)
                softmax_sums(here, grad, scale, block.begin + row + i + 1, block.width, &share[i], &inner[i],
                             narrow);
            else memset(here, 0, block.width * sizeof(float));
        }
        softmax_grads(scores, grads, share, inner, own.pairs + row / 2 * block.stride,
                      own.grad_pairs + row / 2 * block.stride, own.rounded + row * block.stride, block.stride, block.width,
                      narrow);
    }
}

/* The gradients of q, k and v; that of the result lies as `mixed`. */
INLINE void backward_unit(const void *grad, int64_t step, const void *q, const void *k, const void *v, void *q_grad,
                          void *k_grad, void *v_grad, uint32_t *space, int64_t group, int64_t length, int64_t size,
                          float scale, int narrow) {
    int64_t padded = padded_of(length), stride = block_at(0, length).stride, steps = steps_of(size, narrow);
    Right key_tiles = in_tiles(k, take(&space, padded * size), length, steps);
    Right value_tiles = in_tiles(v, take(&space, padded * size), length, steps);
    Right keys = pairs_of_unit(k, take(&space, padded * size), length, size, narrow);
    Backward own = take_backward(&space, size, stride);
    float *k_sums = (float *)take(&space, size * stride), *v_sums = (float *)take(&space, size * stride);
    memset(k_sums, 0, size * stride * sizeof(float));
    memset(v_sums, 0, size * stride * sizeof(float));
    for (int64_t head = 0; head < group; head++)
        for (int64_t begin = 0; begin < length; begin += QUERIES) {
            Block block = block_at(begin, length);
            int64_t first = (head * length + begin) * size, row_steps = steps_of(QUERIES, narrow);
            const void *first_grad = row_of(grad, begin * step + head * size, narrow);
            const uint32_t *rows = whole_block(row_of(q, first, narrow), size, own.q_copy, block.rows, size, narrow);
            const uint32_t *grads = whole_block(first_grad, step, own.grad_copy, block.rows, size, narrow);
            multiply((Left){rows, steps, 1}, key_tiles, own.scores, stride, QUERIES, block.width, steps, 0, narrow);
            multiply((Left){grads, steps, 1}, value_tiles, own.inner, stride, QUERIES, block.width, steps, 0, narrow);
            softmax_of_block(own, block, scale, narrow);
            Right side = {narrow ? own.pairs : (uint32_t *)own.scores, stride, TILE};
            Right grad_side = {narrow ? own.grad_pairs : (uint32_t *)own.inner, stride, TILE};
            multiply(turned_block(grads, own.grad_turned, size, narrow), side, v_sums, stride, size, block.width,
                     row_steps, 1, narrow);
            multiply(turned_block(rows, own.q_turned, size, narrow), grad_side, k_sums, stride, size, block.width,
                     row_steps, 1, narrow);
            multiply(rows_of_scores(own.inner, own.rounded, block, narrow), keys, own.out, size, QUERIES, size,
                     steps_of_keys(block, narrow), 0, narrow);
            store_rows(own.out, row_of(q_grad, first, narrow), block.rows, size, scale, narrow);
        }
    store_columns(k_sums, stride, k_grad, length, size, scale, narrow);
    store_columns(v_sums, stride, v_grad, length, size, 1.0f, narrow);
}

/* Where a unit's numbers begin: `one` in k and v, `all` in q, `mixed` in the result, whose queries are `step` apart. */
typedef struct { int64_t one, all, mixed, step; } Place;

INLINE Place place_of(int64_t unit, int64_t kv_heads, int64_t group, int64_t length, int64_t size) {
    int64_t one = length * size, step = kv_heads * group * size;
    return (Place){unit * one, unit * one * group, unit / kv_heads * length * step + unit % kv_heads * group * size, step};
}

/* Each thread takes units, one after the other, with `space_size` elements of `space` for each unit under way. A sequence
   has `kv_heads` of them. */
void attention(const void *q, const void *k, const void *v, void *mixed, uint32_t *space, int64_t space_size,
               int64_t units, int64_t kv_heads, int64_t group, int64_t length, int64_t size, double scale,
               int64_t narrow, int64_t threads) {
    UNITS(threads)
    for (int64_t unit = 0; unit < units; unit++) {
        Place at = place_of(unit, kv_heads, group, length, size);
        uint32_t *own = space + omp_get_thread_num() * space_size;
#define PASS(kind)                                                                                              \
    forward_unit(row_of(q, at.all, kind), row_of(k, at.one, kind), row_of(v, at.one, kind),                     \
                 row_of(mixed, at.mixed, kind), at.step, own, group, length, size, (float)scale, kind)
        if (narrow == TILES) ON_TILES(PASS(TILES));
        else if (narrow) PASS(1);
        else PASS(0);
#undef PASS
    }
}

void attention_grads(const void *grad, const void *q, const void *k, const void *v, void *q_grad, void *k_grad,
                     void *v_grad, uint32_t *space, int64_t space_size, int64_t units, int64_t kv_heads, int64_t group,
                     int64_t length, int64_t size, double scale, int64_t narrow, int64_t threads) {
    UNITS(threads)
    for (int64_t unit = 0; unit < units; unit++) {
        Place at = place_of(unit, kv_heads, group, length, size);
        uint32_t *own = space + omp_get_thread_num() * space_size;
#define PASS(kind)                                                                                              \
    backward_unit(row_of(grad, at.mixed, kind), at.step, row_of(q, at.all, kind), row_of(k, at.one, kind),      \
                  row_of(v, at.one, kind), row_of(q_grad, at.all, kind), row_of(k_grad, at.one, kind),          \
                  row_of(v_grad, at.one, kind), own, group, length, size, (float)scale, kind)
        if (narrow == TILES) ON_TILES(PASS(TILES));
        else if (narrow) PASS(1);
        else PASS(0);
#undef PASS
    }
}
#endif
