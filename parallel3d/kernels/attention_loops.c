/* Causal attention (torch_attention.py defines it) for processors with AVX-512: fp32, and with AVX512 BF16 products of
   bf16 factors with results in fp32.

   An element of a product's factors has 32 bits: a number in fp32, or two bf16 numbers that follow each other along the
   sum. So one loop multiplies both, and only the packing differs:

       scores         = rows of q            x  keys in tiles of 64 columns
       mixed          = rows of p            x  values, two keys side by side
       values' grads  = grads, two queries   x  rows of p, two queries side by side      (transposed: size x keys)
       ...            and the same with the gradients of p and of the scores

   A unit (a key-value head of a sequence) belongs to one thread and sums are in order, so the bits do not depend on the
   number of threads. Products are those of the processor, like all other products. */

#include <omp.h>

#include "lanes.h"

#ifdef __AVX512BW__
#define QUERIES 64 /* at a time */
#define TILE 64
#define STEPS 128 /* of a sum at a time: 32 KiB of the second factor, which a first-level cache holds */
#define UNITS(threads) _Pragma("omp parallel for schedule(dynamic) num_threads((int)threads)")

#ifdef __AVX512BF16__
void attention_multiplies_bf16(void) {}
#define BF16_PLUS(sum, a, b) _mm512_dpbf16_ps(sum, (__m512bh)(a), (__m512bh)(b))
#else
#define BF16_PLUS(sum, a, b) (sum)
#endif

INLINE int64_t padded_of(int64_t length) { return (length + TILE - 1) / TILE * TILE; }
INLINE int64_t steps_of(int64_t numbers, int narrow) { return narrow ? (numbers + 1) / 2 : numbers; }

/* --- products --- */

typedef struct { const uint32_t *at; int64_t row, step; } Left;         /* element (i, s): at[i row + s step] */
typedef struct { const uint32_t *at; int64_t step, tile; } Right;       /* (s, j): at[s step + j / 64 tile + j % 64] */

/* out (4, 16 parts) = (out +) a b; parts of 16 columns. */
INLINE void multiply_tile(const uint32_t *a, int64_t a_row, int64_t a_step, const uint32_t *b, int64_t b_step, float *out,
                          int64_t out_row, int64_t steps, int adds, int parts, int narrow) {
    __m512 sums[4][4];
    for (int row = 0; row < 4; row++)
        for (int part = 0; part < parts; part++)
            sums[row][part] = adds ? _mm512_loadu_ps(out + row * out_row + part * LANES) : _mm512_setzero_ps();
    for (int64_t s = 0; s < steps; s++) {
        __m512i columns[4];
        for (int part = 0; part < parts; part++) columns[part] = _mm512_loadu_si512(b + s * b_step + part * LANES);
        for (int row = 0; row < 4; row++) {
            __m512i both = _mm512_set1_epi32((int)a[row * a_row + s * a_step]);
            for (int part = 0; part < parts; part++)
                sums[row][part] = narrow ? BF16_PLUS(sums[row][part], both, columns[part])
                                         : _mm512_fmadd_ps((__m512)both, (__m512)columns[part], sums[row][part]);
        }
    }
    for (int row = 0; row < 4; row++)
        for (int part = 0; part < parts; part++) _mm512_storeu_ps(out + row * out_row + part * LANES, sums[row][part]);
}

/* out (rows, width) = (out +) a (rows, steps) b (steps, width); rows are a multiple of 4, width of 16. */
static void multiply(Left a, Right b, float *out, int64_t out_row, int64_t rows, int64_t width, int64_t steps,
                     int adds, int narrow) {
    for (int64_t first = 0; first < steps; first += STEPS) {
        int64_t some = steps - first < STEPS ? steps - first : STEPS, parts;
        int adds_here = adds || first;
        for (int64_t column = 0; column < width; column += parts * LANES) {
            const uint32_t *right = b.at + first * b.step + column / TILE * b.tile + column % TILE;
            parts = width - column >= 64 ? 4 : width - column >= 32 ? 2 : 1;
            for (int64_t row = 0; row < rows; row += 4) {
                const uint32_t *left = a.at + row * a.row + first * a.step;
                float *here = out + row * out_row + column;
#define PASS(parts, kind) multiply_tile(left, a.row, a.step, right, b.step, here, out_row, some, adds_here, parts, kind)
                if (parts == 4 && narrow) PASS(4, 1);
                else if (parts == 4) PASS(4, 0);
                else if (parts == 2 && narrow) PASS(2, 1);
                else if (parts == 2) PASS(2, 0);
                else if (narrow) PASS(1, 1);
                else PASS(1, 0);
#undef PASS
            }
        }
    }
}

/* --- packing --- */

/* The next `count` elements of a thread's space. */
INLINE uint32_t *take(uint32_t **space, int64_t count) {
    uint32_t *taken = *space;
    *space += (count + LANES - 1) / LANES * LANES;
    return taken;
}

/* x (length, steps) -> (tiles, steps, 64): columns of a product; those from `length` on are 0. */
INLINE Right in_tiles(const uint32_t *x, uint32_t *out, int64_t length, int64_t steps) {
    for (int64_t first = 0; first < length; first += TILE)
        for (int64_t s = 0; s < steps; s++)
            for (int64_t i = first; i < first + TILE; i++)
                out[first * steps + s * TILE + i - first] = i < length ? x[i * steps + s] : 0;
    return (Right){out, TILE, TILE * steps};
}

/* bf16: x (rows, width), `stride` numbers apart, -> two rows side by side (rows / 2, width). fp32: x as it is. The rows
   are `step` elements apart in the result; a last odd one is paired with zeros. */
INLINE const uint32_t *in_pairs(const void *x, int64_t stride, uint32_t *out, int64_t step, int64_t rows, int64_t width,
                                int narrow) {
    if (!narrow) return x;
    for (int64_t row = 0; row < rows; row += 2) {
        const uint16_t *low = (const uint16_t *)x + row * stride;
        uint32_t *both = out + row / 2 * step;
        EACH_LANES(width,
            uvec pair = (uvec)load(low, i, n, 1) >> 16;
            if (row + 1 < rows) pair |= (uvec)load(low + stride, i, n, 1);
            store(both, i, n, 0, (vec)pair);)
    }
    return out;
}

/* A block's rows (rows, size): in place if they are whole, else a copy with rows of zeros. */
INLINE const uint32_t *whole_block(const void *x, uint32_t *copy, int64_t rows, int64_t size, int narrow) {
    if (rows == QUERIES) return x;
    int64_t bytes = size * (narrow ? 2 : 4);
    memcpy(copy, x, rows * bytes);
    memset((char *)copy + rows * bytes, 0, (QUERIES - rows) * bytes);
    return copy;
}

INLINE void store_rows(const float *x, void *out, int64_t rows, int64_t size, float scale, int narrow) {
    EACH_LANES(rows * size, store(out, i, n, narrow, load(x, i, n, 0) * scale);)
}

/* x (size, length), `stride` apart -> out (length, size), times scale. */
INLINE void store_columns(const float *x, int64_t stride, void *out, int64_t length, int64_t size, float scale,
                          int narrow) {
    float column[LANES][512];
    for (int64_t first = 0; first < length; first += LANES) {
        for (int64_t row = 0; row < size; row++)
            for (int lane = 0; lane < LANES; lane++) column[lane][row] = x[row * stride + first + lane];
        for (int64_t i = first; i < length && i < first + LANES; i++)
            store_rows(column[i - first], row_of(out, i * size, narrow), 1, size, scale, narrow);
    }
}

/* --- softmax --- */

INLINE vec first_lanes(vec x, int64_t n) { /* the others are 0 */
    vec found = {0};
    memcpy(&found, &x, n * sizeof(float));
    return found;
}

/* Scores times `scale` become probabilities, rounded ones go to `rounded` if it is narrow; 0 from `seen` to width. */
INLINE void softmax_row(float *scores, void *rounded, float scale, int64_t seen, int64_t width, int narrow) {
    float largest = row_max_of(scores, seen, 0) * scale;
    vec sums = {0};
    EACH_LANES(seen,
        vec power = exp_of(load(scores, i, n, 0) * scale - largest, narrow);
        if (n < LANES) power = first_lanes(power, n);
        store(scores, i, n, 0, power);
        sums += power;)
    float share = 1.0f / sum_of(sums);
    memset(scores + seen, 0, (width - seen) * sizeof(float));
    EACH_LANES(width,
        vec probability = load(scores, i, n, 0) * share;
        store(scores, i, n, 0, probability);
        if (narrow) store(rounded, i, n, 1, probability);)
}

/* p (g - sum(p g)), in g's place, and rounded. */
INLINE void softmax_grads_row(float *grad, const float *probability, void *rounded, int64_t width, int narrow) {
    vec products = {0};
    EACH_LANES(width, products += load(grad, i, n, 0) * load(probability, i, n, 0);)
    float inner = sum_of(products);
    void *place = narrow ? rounded : grad;
    EACH_LANES(width, store(place, i, n, narrow, load(probability, i, n, 0) * (load(grad, i, n, 0) - inner));)
}

/* --- attention --- */

/* Some of a head's queries, `begin` to `begin + rows`, which see the keys before `end`. Rows of scores are `stride`
   numbers apart, in fp32 and in bf16. */
typedef struct { int64_t begin, rows, end, width, stride; } Block;

INLINE Block block_at(int64_t begin, int64_t length) {
    int64_t rows = length - begin < QUERIES ? length - begin : QUERIES, end = begin + rows;
    return (Block){begin, rows, end, padded_of(end), padded_of(length) + 2 * LANES};
}

/* The left factor that lies in rows: scores' format, `rounded` if it is narrow. */
INLINE Left rows_of_scores(const float *wide, const uint32_t *rounded, Block block, int narrow) {
    return narrow ? (Left){rounded, block.stride / 2, 1} : (Left){(const uint32_t *)wide, block.stride, 1};
}

/* Probabilities of a block in `scores`, and in bf16 also in `rounded`, with rows of zeros up to QUERIES. */
INLINE void find_probabilities(const uint32_t *q, Right keys, float *scores, uint32_t *rounded, Block block,
                               int64_t size, float scale, int narrow) {
    int64_t steps = steps_of(size, narrow);
    multiply((Left){q, steps, 1}, keys, scores, block.stride, QUERIES, block.width, steps, 0, narrow);
    for (int64_t row = 0; row < block.rows; row++)
        softmax_row(scores + row * block.stride, row_of(rounded, row * block.stride, narrow), scale,
                    block.begin + row + 1, block.width, narrow);
    for (int64_t row = block.rows; row < QUERIES; row++) {
        memset(scores + row * block.stride, 0, block.width * sizeof(float));
        if (narrow) memset(row_of(rounded, row * block.stride, 1), 0, block.width * sizeof(uint16_t));
    }
}

/* q (group, length, size), k and v (length, size) -> mixed as q. */
INLINE void forward_unit(const void *q, const void *k, const void *v, void *mixed, uint32_t *space, int64_t group,
                         int64_t length, int64_t size, float scale, int narrow) {
    int64_t padded = padded_of(length), stride = block_at(0, length).stride;
    Right keys = in_tiles(k, take(&space, padded * size), length, steps_of(size, narrow));
    Right values = {in_pairs(v, size, take(&space, padded * size), size, length, size, narrow), size, TILE};
    uint32_t *copy = take(&space, QUERIES * size), *rounded = take(&space, QUERIES * stride);
    float *scores = (float *)take(&space, QUERIES * stride), *out = (float *)take(&space, QUERIES * size);
    for (int64_t head = 0; head < group; head++)
        for (int64_t begin = 0; begin < length; begin += QUERIES) {
            Block block = block_at(begin, length);
            int64_t first = (head * length + begin) * size;
            const uint32_t *rows = whole_block(row_of(q, first, narrow), copy, block.rows, size, narrow);
            find_probabilities(rows, keys, scores, rounded, block, size, scale, narrow);
            multiply(rows_of_scores(scores, rounded, block, narrow), values, out, size, QUERIES, size,
                     steps_of(block.end, narrow), 0, narrow);
            store_rows(out, row_of(mixed, first, narrow), block.rows, size, 1.0f, narrow);
        }
}

/* The gradients of q, k and v. */
INLINE void backward_unit(const void *grad, const void *q, const void *k, const void *v, void *q_grad, void *k_grad,
                          void *v_grad, uint32_t *space, int64_t group, int64_t length, int64_t size, float scale,
                          int narrow) {
    int64_t padded = padded_of(length), stride = block_at(0, length).stride, steps = steps_of(size, narrow);
    Right key_tiles = in_tiles(k, take(&space, padded * size), length, steps);
    Right value_tiles = in_tiles(v, take(&space, padded * size), length, steps);
    Right keys = {in_pairs(k, size, take(&space, padded * size), size, length, size, narrow), size, TILE};
    uint32_t *q_copy = take(&space, QUERIES * size), *grad_copy = take(&space, QUERIES * size);
    uint32_t *q_space = take(&space, QUERIES * size), *grad_space = take(&space, QUERIES * size);
    uint32_t *rounded = take(&space, QUERIES * stride), *pairs = take(&space, QUERIES * stride);
    float *scores = (float *)take(&space, QUERIES * stride), *inner = (float *)take(&space, QUERIES * stride);
    float *out = (float *)take(&space, QUERIES * size);
    float *k_sums = (float *)take(&space, size * stride), *v_sums = (float *)take(&space, size * stride);
    memset(k_sums, 0, size * stride * sizeof(float));
    memset(v_sums, 0, size * stride * sizeof(float));
    for (int64_t head = 0; head < group; head++)
        for (int64_t begin = 0; begin < length; begin += QUERIES) {
            Block block = block_at(begin, length);
            int64_t first = (head * length + begin) * size, row_steps = steps_of(QUERIES, narrow);
            const uint32_t *rows = whole_block(row_of(q, first, narrow), q_copy, block.rows, size, narrow);
            const uint32_t *grads = whole_block(row_of(grad, first, narrow), grad_copy, block.rows, size, narrow);
            Left q_pairs = {in_pairs(rows, size, q_space, size, QUERIES, size, narrow), 1, size};
            Left grad_pairs = {in_pairs(grads, size, grad_space, size, QUERIES, size, narrow), 1, size};
            const void *factor = narrow ? (const void *)rounded : scores;

            find_probabilities(rows, key_tiles, scores, rounded, block, size, scale, narrow);
            Right side = {in_pairs(factor, stride, pairs, stride, QUERIES, block.width, narrow), stride, TILE};
            multiply(grad_pairs, side, v_sums, stride, size, block.width, row_steps, 1, narrow);

            multiply((Left){grads, steps, 1}, value_tiles, inner, stride, QUERIES, block.width, steps, 0, narrow);
            for (int64_t row = 0; row < QUERIES; row++)
                softmax_grads_row(inner + row * stride, scores + row * stride, row_of(rounded, row * stride, narrow),
                                  block.width, narrow);
            factor = narrow ? (const void *)rounded : inner;
            side.at = in_pairs(factor, stride, pairs, stride, QUERIES, block.width, narrow);
            multiply(q_pairs, side, k_sums, stride, size, block.width, row_steps, 1, narrow);
            multiply(rows_of_scores(inner, rounded, block, narrow), keys, out, size, QUERIES, size,
                     steps_of(block.end, narrow), 0, narrow);
            store_rows(out, row_of(q_grad, first, narrow), block.rows, size, scale, narrow);
        }
    store_columns(k_sums, stride, k_grad, length, size, scale, narrow);
    store_columns(v_sums, stride, v_grad, length, size, 1.0f, narrow);
}

/* Each thread takes units, one after the other, with `space_size` elements of `space` for each unit under way. */
void attention(const void *q, const void *k, const void *v, void *mixed, uint32_t *space, int64_t space_size,
               int64_t units, int64_t group, int64_t length, int64_t size, double scale, int64_t narrow,
               int64_t threads) {
    UNITS(threads)
    for (int64_t unit = 0; unit < units; unit++) {
        int64_t one = unit * length * size, all = one * group;
        uint32_t *own = space + omp_get_thread_num() * space_size;
#define PASS(kind)                                                                                              \
    forward_unit(row_of(q, all, kind), row_of(k, one, kind), row_of(v, one, kind), row_of(mixed, all, kind), own, group, \
                 length, size, (float)scale, kind)
        if (narrow) PASS(1);
        else PASS(0);
#undef PASS
    }
}

void attention_grads(const void *grad, const void *q, const void *k, const void *v, void *q_grad, void *k_grad,
                     void *v_grad, uint32_t *space, int64_t space_size, int64_t units, int64_t group, int64_t length,
                     int64_t size, double scale, int64_t narrow, int64_t threads) {
    UNITS(threads)
    for (int64_t unit = 0; unit < units; unit++) {
        int64_t one = unit * length * size, all = one * group;
        uint32_t *own = space + omp_get_thread_num() * space_size;
#define PASS(kind)                                                                                              \
    backward_unit(row_of(grad, all, kind), row_of(q, all, kind), row_of(k, one, kind), row_of(v, one, kind),    \
                  row_of(q_grad, all, kind), row_of(k_grad, one, kind), row_of(v_grad, one, kind), own, group, length, \
                  size, (float)scale, kind)
        if (narrow) PASS(1);
        else PASS(0);
#undef PASS
    }
}
#endif
