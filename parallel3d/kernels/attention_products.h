/* Products of attention_loops.c: of fp32 factors, and of bf16 ones with results in fp32, by AVX512 BF16 or by AMX, whose
   registers ("tiles") hold 16 rows of 64 bytes.

   An element of a product's factors has 32 bits: a number in fp32, or two bf16 numbers that follow each other along the
   sum. So one loop multiplies both, and only the packing differs. `narrow` is 0 for fp32, 1 for bf16, and TILES for bf16
   by AMX. Each result is one sum over its elements in order. */

#include "tiles.h"
#include "wide_lanes.h"

#define TILES 2
#define QUERIES 64 /* at a time */
#define TILE 64
#define STEPS 128 /* of a sum at a time: 32 KiB of the second factor, which a first-level cache holds */

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
    wide sums[4][ROW_VECTORS];
    for (int row = 0; row < 4; row++)
        for (int part = 0; part < parts; part++)
            sums[row][part] = adds ? wide_at(out + row * out_row + part * LANES) : wide_of(0);
    for (int64_t s = 0; s < steps; s++) {
        wide columns[ROW_VECTORS];
        for (int part = 0; part < parts; part++) columns[part] = wide_at(b + s * b_step + part * LANES);
        for (int row = 0; row < 4; row++) {
            wide both = wide_of_bits(a[row * a_row + s * a_step]);
            for (int part = 0; part < parts; part++)
                sums[row][part] = narrow ? BF16_PLUS(sums[row][part], both, columns[part])
                                         : times_plus(both, columns[part], sums[row][part]);
        }
    }
    for (int row = 0; row < 4; row++)
        for (int part = 0; part < parts; part++) put(out + row * out_row + part * LANES, sums[row][part]);
}

/* out (rows, width) = (out +) a (rows, steps) b (steps, width); rows are a multiple of 4, width of 16. */
static void multiply_vectors(Left a, Right b, float *out, int64_t out_row, int64_t rows, int64_t width, int64_t steps,
                     int adds, int narrow) {
    for (int64_t first = 0; first < steps; first += STEPS) {
        int64_t some = steps - first < STEPS ? steps - first : STEPS, parts;
        int adds_here = adds || first;
        for (int64_t column = 0; column < width; column += parts * LANES) {
            const uint32_t *right = b.at + first * b.step + column / TILE * b.tile + column % TILE;
            parts = ROW_VECTORS == 1 || width - column < 32 ? 1 : width - column < 64 ? 2 : 4;
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

/* The same; for tiles, rows and width are multiples of 32, steps of 16, and a's elements of a row lie side by side. */
INLINE void multiply(Left a, Right b, float *out, int64_t out_row, int64_t rows, int64_t width, int64_t steps, int adds,
                     int narrow) {
#ifdef __AMX_BF16__
    if (narrow == TILES) {
        BARRIER;
        for (int64_t column = 0; column < width; column += 32)
            for (int64_t row = 0; row < rows; row += 32)
                multiply_tiles(a.at + row * a.row, a.row, b.at + column / TILE * b.tile + column % TILE, b.step,
                               out + row * out_row + column, out_row, steps, adds);
        BARRIER;
        return;
    }
#endif
    multiply_vectors(a, b, out, out_row, rows, width, steps, adds, narrow);
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
    for (int64_t first = 0; first < length; first += TILE) {
        uint32_t *tile = out + first * steps;
        if (first + TILE <= length && steps % LANES == 0) {
            for (int64_t i = 0; i < TILE; i += LANES)
                for (int64_t s = 0; s < steps; s += LANES) turn(x + (first + i) * steps + s, steps, tile + s * TILE + i, TILE);
            continue;
        }
        for (int64_t s = 0; s < steps; s++)
            for (int64_t i = 0; i < TILE; i++) tile[s * TILE + i] = first + i < length ? x[(first + i) * steps + s] : 0;
    }
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

/* The keys' or values' rows (length, size) as `in_pairs`, up to `padded` of them with zeros, which tiles add up too. */
INLINE Right pairs_of_unit(const void *x, uint32_t *out, int64_t length, int64_t size, int narrow) {
    if (narrow) memset(out + length / 2 * size, 0, (padded_of(length) - length + 1) / 2 * size * sizeof *out);
    return (Right){in_pairs(x, size, out, size, length, size, narrow), size, TILE};
}

/* A block's rows (QUERIES, size) as a left factor whose rows are the columns of x, with `space` for both. */
INLINE Left turned_block(const uint32_t *x, uint32_t *space, int64_t size, int narrow) {
    if (narrow != TILES) return (Left){in_pairs(x, size, space, size, QUERIES, size, narrow), 1, size};
    uint32_t *turned = space + QUERIES / 2 * size;
    in_pairs(x, size, space, size, QUERIES, size, narrow);
    for (int64_t s = 0; s < QUERIES / 2; s += LANES)
        for (int64_t i = 0; i < size; i += LANES) turn(space + s * size + i, size, turned + i * QUERIES / 2 + s, QUERIES / 2);
    return (Left){turned, QUERIES / 2, 1};
}

/* A block's rows (rows, size), `step` numbers apart: in place if they are whole and one after the other, else a copy with
   rows of zeros. */
INLINE const uint32_t *whole_block(const void *x, int64_t step, uint32_t *copy, int64_t rows, int64_t size,
                                   int narrow) {
    if (rows == QUERIES && step == size) return x;
    int64_t bytes = size * (narrow ? 2 : 4);
    for (int64_t row = 0; row < rows; row++) memcpy((char *)copy + row * bytes, row_of(x, row * step, narrow), bytes);
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
        for (int64_t row = 0; row < size; row += LANES)
            turn((const uint32_t *)x + row * stride + first, stride, (uint32_t *)&column[0][row], 512);
        for (int64_t i = first; i < length && i < first + LANES; i++)
            store_rows(column[i - first], row_of(out, i * size, narrow), 1, size, scale, narrow);
    }
}
