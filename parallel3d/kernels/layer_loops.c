/* The C forms of the kernels in torch_norms.py, torch_rotary.py, torch_activations.py and torch_cross_entropy.py, and
   of attention's softmax. Numbers are bf16 (`narrow`) or fp32 in memory, and fp32 in between.

   All arithmetic is on vectors of 16 lanes, whatever the processor has, without contracted multiplications and
   additions, and sums are cut into lanes and blocks of rows by index alone: bits depend neither on the processor nor on
   the number of threads. A row, or a block of rows, belongs to one thread. Only attention's products in bf16 are those
   of the processor, like all other products. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512BW__
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define LANES 16
#define BLOCK_ROWS 32 /* of a weight's gradient; c_norms.py knows it too */
#define CHUNK 4096
#define ROWS(threads) _Pragma("omp parallel for schedule(static) num_threads((int)threads)")

typedef float vec __attribute__((vector_size(64)));
typedef int32_t ivec __attribute__((vector_size(64)));
typedef uint32_t uvec __attribute__((vector_size(64)));
typedef uint16_t halves __attribute__((vector_size(32)));

/* Does the statements for the elements i to i + n - 1, n being LANES but for the last ones. */
#define EACH_LANES(width, ...)                     \
    {                                              \
        int64_t i = 0;                             \
        for (; i + LANES <= (width); i += LANES) { \
            const int64_t n = LANES;               \
            __VA_ARGS__                            \
        }                                          \
        if (i < (width)) {                         \
            int64_t n = (width)-i;                 \
            __VA_ARGS__                            \
        }                                          \
    }

#ifdef __AVX512BW__ /* one instruction each; GCC 12 makes six of a conversion between vectors */
INLINE uvec long_of(halves x) { return (uvec)_mm512_cvtepu16_epi32((__m256i)x); }
INLINE halves short_of(uvec x) { return (halves)_mm512_cvtepi32_epi16((__m512i)x); }
#else
INLINE uvec long_of(halves x) { return __builtin_convertvector(x, uvec); }
INLINE halves short_of(uvec x) { return __builtin_convertvector(x, halves); }
#endif

INLINE vec widened(halves x) { return (vec)(long_of(x) << 16); }

/* To the nearest, ties to even. NaNs stay NaNs: results of arithmetic on bf16 numbers have no bits set below bf16's that
   a carry could start from. */
INLINE halves narrowed(vec x) {
    uvec bits = (uvec)x;
    return short_of((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

/* The lanes i to i + n - 1 of an array; lanes from n on are zero. */
INLINE vec load(const void *array, int64_t i, int64_t n, int narrow) {
    if (narrow) {
        halves x = {0};
        if (n >= LANES) memcpy(&x, (const uint16_t *)array + i, sizeof x);
        else memcpy(&x, (const uint16_t *)array + i, n * 2);
        return widened(x);
    }
    vec x = {0};
    if (n >= LANES) memcpy(&x, (const float *)array + i, sizeof x);
    else memcpy(&x, (const float *)array + i, n * 4);
    return x;
}

INLINE void store(void *array, int64_t i, int64_t n, int narrow, vec value) {
    if (narrow) {
        halves x = narrowed(value);
        if (n >= LANES) memcpy((uint16_t *)array + i, &x, sizeof x);
        else memcpy((uint16_t *)array + i, &x, n * 2);
    } else if (n >= LANES) memcpy((float *)array + i, &value, sizeof value);
    else memcpy((float *)array + i, &value, n * 4);
}

INLINE void *row_of(const void *array, int64_t first, int narrow) {
    return (char *)array + first * (narrow ? 2 : 4);
}

INLINE float sum_of(vec x) {
    float part[LANES];
    memcpy(part, &x, sizeof x);
    for (int half = LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++) part[lane] += part[lane + half];
    return part[0];
}

/* The second one if one is NaN. */
#ifdef __AVX512BW__
INLINE vec larger_of(vec a, vec b) { return (vec)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vec smaller_of(vec a, vec b) { return (vec)_mm512_min_ps((__m512)a, (__m512)b); }
#else
INLINE vec where(ivec condition, vec yes, vec no) { return (vec)(((ivec)yes & condition) | ((ivec)no & ~condition)); }
INLINE vec larger_of(vec a, vec b) { return where(a > b, a, b); }
INLINE vec smaller_of(vec a, vec b) { return where(a < b, a, b); }
#endif

INLINE float largest_of(vec x) {
    float part[LANES], found;
    memcpy(part, &x, sizeof x);
    found = part[0];
    for (int lane = 1; lane < LANES; lane++) found = part[lane] > found || part[lane] != part[lane] ? part[lane] : found;
    return found;
}

/* exp(x) for -87 < x < 88, and exp(-87) or exp(88) beyond: 2^n times a polynomial of x - n log 2 (Cephes, expf), to
   1 ulp, or to 3e-6 if the result will be narrowed. A NaN stays one, since its lowest 9 bits are 0. */
INLINE vec exp_of(vec x, int narrow) {
    vec magic = (vec){0} + 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    vec clipped = smaller_of((vec){0} + 88.0f, larger_of((vec){0} - 87.0f, x));
    vec shifted = clipped * 1.44269504088896341f + magic, n = shifted - magic, r, p;
    if (narrow) {
        r = clipped - n * 0.693147180559945286f;
        p = r * 8.3701630e-3f + 4.1673378e-2f;
    } else {
        r = clipped - n * 0.693359375f + n * 2.12194440e-4f;
        p = ((r * 1.9875691500e-4f + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f;
    }
    p = (p * r + 1.6666665459e-1f) * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    return (vec)((ivec)p + (((ivec)shifted - (ivec)magic) << 23)); /* 0.7 <= p < 1.5: its exponent has room for n */
}

INLINE vec sigmoid_of(vec x, int narrow) { return 1.0f / (1.0f + exp_of(-x, narrow)); }

/* --- norms --- */

INLINE void rms_norm_row(const void *x, const void *delta, const float *weight, void *total, void *y, float *scale,
                         int64_t width, float eps, int narrow) {
    vec squares = {0};
    EACH_LANES(width,
        vec t = load(x, i, n, narrow);
        if (delta) {
            t += load(delta, i, n, narrow);
            if (narrow) t = widened(narrowed(t));
            store(total, i, n, narrow, t);
        }
        squares += t * t;)
    *scale = 1.0f / sqrtf(sum_of(squares) / (float)width + eps);
    EACH_LANES(width,
        vec t = load(delta ? total : x, i, n, narrow);
        store(y, i, n, narrow, t * *scale * load(weight, i, n, 0));)
}

void rms_norm(const void *x, const void *delta, const float *weight, void *total, void *y, float *scale, int64_t rows,
              int64_t width, double eps, int64_t narrow, int64_t threads) {
    ROWS(threads)
    for (int64_t row = 0; row < rows; row++) {
        int64_t first = row * width;
#define PASS(kind)                                                                                              \
    rms_norm_row(row_of(x, first, kind), delta ? row_of(delta, first, kind) : 0, weight, row_of(total, first, kind), \
                 row_of(y, first, kind), scale + row, width, (float)eps, kind)
        if (narrow) PASS(1);
        else PASS(0);
#undef PASS
    }
}

INLINE void rms_norm_grads_row(const void *grad, const void *total, const void *residual_grad, const float *weight,
                               void *total_grad, float *weight_grad, float scale, int64_t width, int narrow) {
    vec inner = {0};
    EACH_LANES(width,
        vec product = load(grad, i, n, narrow) * (load(total, i, n, narrow) * scale);
        store(weight_grad, i, n, 0, load(weight_grad, i, n, 0) + product);
        inner += product * load(weight, i, n, 0);)
    float mean = sum_of(inner) / (float)width;
    EACH_LANES(width,
        vec wide = load(grad, i, n, narrow) * load(weight, i, n, 0);
        vec found = (wide - load(total, i, n, narrow) * scale * mean) * scale;
        if (residual_grad) found += load(residual_grad, i, n, narrow);
        store(total_grad, i, n, narrow, found);)
}

/* `partial` (blocks of rows, width), zero before, gets the weight's gradient by blocks. */
void rms_norm_grads(const void *grad, const void *total, const void *residual_grad, const float *weight,
                    const float *scale, void *total_grad, float *partial, int64_t rows, int64_t width, int64_t narrow,
                    int64_t threads) {
    ROWS(threads)
    for (int64_t block = 0; block < (rows + BLOCK_ROWS - 1) / BLOCK_ROWS; block++) {
        int64_t end = (block + 1) * BLOCK_ROWS < rows ? (block + 1) * BLOCK_ROWS : rows;
        float *weight_grad = partial + block * width;
        for (int64_t row = block * BLOCK_ROWS; row < end; row++) {
            int64_t first = row * width;
#define PASS(kind)                                                                                            \
    rms_norm_grads_row(row_of(grad, first, kind), row_of(total, first, kind),                                 \
                       residual_grad ? row_of(residual_grad, first, kind) : 0, weight, row_of(total_grad, first, kind), \
                       weight_grad, scale[row], width, kind)
            if (narrow) PASS(1);
            else PASS(0);
#undef PASS
        }
    }
}

INLINE void add_column(float *partial, int64_t i, int64_t n, int64_t blocks, int64_t width) {
    vec sum = load(partial, i, n, 0);
    for (int64_t block = 1; block < blocks; block++) sum += load(partial, block * width + i, n, 0);
    store(partial, i, n, 0, sum);
}

/* Adds up the rows of `partial` in order, in its first one. */
void add_blocks(float *partial, int64_t blocks, int64_t width, int64_t threads) {
    ROWS(threads)
    for (int64_t i = 0; i < width; i += LANES) {
        if (i + LANES <= width) add_column(partial, i, LANES, blocks, width);
        else add_column(partial, i, width - i, blocks, width);
    }
}

/* --- activations --- */

INLINE void silu_times_row(const void *gate_up, void *result, int64_t width, int narrow) {
    EACH_LANES(width,
        vec gate = load(gate_up, i, n, narrow);
        store(result, i, n, narrow, gate * sigmoid_of(gate, narrow) * load(gate_up, width + i, n, narrow));)
}

void silu_times(const void *gate_up, void *result, int64_t rows, int64_t width, int64_t narrow, int64_t threads) {
    ROWS(threads)
    for (int64_t row = 0; row < rows; row++) {
        if (narrow) silu_times_row(row_of(gate_up, 2 * row * width, 1), row_of(result, row * width, 1), width, 1);
        else silu_times_row(row_of(gate_up, 2 * row * width, 0), row_of(result, row * width, 0), width, 0);
    }
}

INLINE void silu_times_grads_row(const void *grad, const void *gate_up, void *gate_up_grad, void *result, int64_t width,
                                 int narrow) {
    EACH_LANES(width,
        vec gate = load(gate_up, i, n, narrow), up = load(gate_up, width + i, n, narrow), g = load(grad, i, n, narrow);
        vec sigmoid = sigmoid_of(gate, narrow), activated = gate * sigmoid;
        store(gate_up_grad, i, n, narrow, g * up * (sigmoid + activated * (1.0f - sigmoid)));
        store(gate_up_grad, width + i, n, narrow, g * activated);
        store(result, i, n, narrow, activated * up);)
}

void silu_times_grads(const void *grad, const void *gate_up, void *gate_up_grad, void *result, int64_t rows,
                      int64_t width, int64_t narrow, int64_t threads) {
    ROWS(threads)
    for (int64_t row = 0; row < rows; row++) {
        int64_t first = row * width;
#define PASS(kind)                                                                                  \
    silu_times_grads_row(row_of(grad, first, kind), row_of(gate_up, 2 * first, kind),               \
                         row_of(gate_up_grad, 2 * first, kind), row_of(result, first, kind), width, kind)
        if (narrow) PASS(1);
        else PASS(0);
#undef PASS
    }
}

/* --- rotary positions --- */

/* (a, b) -> (a cos - b sin, b cos + a sin), with the sign of sin; `half` elements each. */
INLINE void rotate_head(const void *x, void *out, const float *cosine, const float *sine, float sign, int64_t half,
                        int narrow) {
    EACH_LANES(half,
        vec a = load(x, i, n, narrow), b = load(x, half + i, n, narrow);
        vec c = load(cosine, i, n, 0), s = load(sine, i, n, 0) * sign;
        store(out, i, n, narrow, a * c - b * s);
        store(out, half + i, n, narrow, b * c + a * s);)
}

/* Rotates `heads` heads of each token of x (batch, length, heads, size) into out, both with strides of a sequence, a
   token and a head, in elements. sign 0: copies them. */
void rotate(const void *x, int64_t x_sequence, int64_t x_token, int64_t x_head, void *out, int64_t out_sequence,
            int64_t out_token, int64_t out_head, const float *cosine, const float *sine, double sign, int64_t batch,
            int64_t length, int64_t heads, int64_t size, int64_t narrow, int64_t threads) {
    ROWS(threads)
    for (int64_t token = 0; token < batch * length; token++) {
        int64_t sequence = token / length, position = token % length, half = size / 2;
        for (int64_t head = 0; head < heads; head++) {
            int64_t from = sequence * x_sequence + position * x_token + head * x_head;
            int64_t to = sequence * out_sequence + position * out_token + head * out_head;
            if (sign == 0.0) memcpy(row_of(out, to, narrow), row_of(x, from, narrow), size * (narrow ? 2 : 4));
#define PASS(kind)                                                                                                  \
    rotate_head(row_of(x, from, kind), row_of(out, to, kind), cosine + position * half, sine + position * half, (float)sign, \
                half, kind)
            else if (narrow) PASS(1);
            else PASS(0);
#undef PASS
        }
    }
}

/* --- cross-entropy --- */

INLINE float row_max_of(const void *logits, int64_t width, int narrow) {
    vec largest = (vec){0} - INFINITY;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) largest = larger_of(largest, load(logits, i, LANES, narrow));
    float found = largest_of(largest);
    for (; i < width; i++) {
        float x = load(logits, i, 1, narrow)[0];
        found = x > found || x != x ? x : found;
    }
    return found;
}

void row_max(const void *logits, int64_t stride, float *largest, int64_t rows, int64_t width, int64_t narrow,
             int64_t threads) {
    ROWS(threads)
    for (int64_t row = 0; row < rows; row++) {
        if (narrow) largest[row] = row_max_of(row_of(logits, row * stride, 1), width, 1);
        else largest[row] = row_max_of(row_of(logits, row * stride, 0), width, 0);
    }
}

INLINE float exp_sum_of(const void *logits, float largest, int64_t width, int narrow) {
    vec sum = {0};
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) sum += exp_of(load(logits, i, LANES, narrow) - largest, narrow);
    float found = sum_of(sum);
    for (; i < width; i++) found += exp_of(load(logits, i, 1, narrow) - largest, narrow)[0];
    return found;
}

/* The target's logit less the largest one (0 if it is another rank's), and the sum of exp(logit - largest). */
void softmax_sums(const void *logits, int64_t stride, const float *largest, const int64_t *target, float *target_logit,
                  float *sums, int64_t rows, int64_t width, int64_t narrow, int64_t threads) {
    ROWS(threads)
    for (int64_t row = 0; row < rows; row++) {
        const void *own = row_of(logits, row * stride, (int)narrow);
        int64_t t = target[row];
        target_logit[row] = t < 0 || t >= width ? 0.0f : load(own, t, 1, (int)narrow)[0] - largest[row];
        sums[row] = narrow ? exp_sum_of(own, largest[row], width, 1) : exp_sum_of(own, largest[row], width, 0);
    }
}

INLINE void softmax_grads_row(void *logits, float largest, float total, int64_t target, float factor, int64_t width,
                              int narrow) {
    float target_exp = 0.0f;
    int is_here = target >= 0 && target < width;
    if (is_here) target_exp = exp_of(load(logits, target, 1, narrow) - largest, narrow)[0];
    EACH_LANES(width,
        store(logits, i, n, narrow, exp_of(load(logits, i, n, narrow) - largest, narrow) / total * factor);)
    if (is_here) store(logits, target, 1, narrow, (vec){0} + (target_exp / total - 1.0f) * factor);
}

/* logits become (softmax - one_hot) * factor. */
void softmax_grads(void *logits, int64_t stride, const float *largest, const float *total, const int64_t *target,
                   double factor, int64_t rows, int64_t width, int64_t narrow, int64_t threads) {
    ROWS(threads)
    for (int64_t row = 0; row < rows; row++) {
        void *own = row_of(logits, row * stride, (int)narrow);
        if (narrow) softmax_grads_row(own, largest[row], total[row], target[row], (float)factor, width, 1);
        else softmax_grads_row(own, largest[row], total[row], target[row], (float)factor, width, 0);
    }
}

/* --- attention's products in bf16 with results in fp32, where the processor has them --- */

#ifdef __AVX512BF16__
#define TILE 64 /* columns; c_attention.py knows it too */

/* Four rows of a (size bf16 each) times 64 columns of b, which has each pair of a column's elements side by side. */
INLINE void multiply_tile(const uint32_t *a, const uint32_t *b, float *out, int64_t pairs, int64_t width, float scale) {
    __m512 sums[4][4];
    for (int row = 0; row < 4; row++)
        for (int part = 0; part < 4; part++) sums[row][part] = _mm512_setzero_ps();
    for (int64_t pair = 0; pair < pairs; pair++) {
        __m512bh columns[4];
        for (int part = 0; part < 4; part++)
            columns[part] = (__m512bh)_mm512_loadu_si512(b + pair * TILE + part * LANES);
        for (int row = 0; row < 4; row++) {
            __m512bh both = (__m512bh)_mm512_set1_epi32((int)a[row * pairs + pair]);
            for (int part = 0; part < 4; part++)
                sums[row][part] = _mm512_dpbf16_ps(sums[row][part], both, columns[part]);
        }
    }
    for (int row = 0; row < 4; row++)
        for (int part = 0; part < 4; part++)
            _mm512_storeu_ps(out + row * width + part * LANES, _mm512_mul_ps(sums[row][part], _mm512_set1_ps(scale)));
}

/* out (units, rows, width) = a (units, rows, 2 pairs) times b (units, tiles, pairs, 64), times scale. */
void bf16_product(const uint32_t *a, const uint32_t *b, int64_t b_unit, float *out, double scale, int64_t units,
                  int64_t rows, int64_t width, int64_t pairs, int64_t threads) {
    ROWS(threads)
    for (int64_t each = 0; each < units * (rows / 4); each++) {
        int64_t unit = each / (rows / 4), first = each * 4; /* of all units' rows */
        for (int64_t column = 0; column < width; column += TILE)
            multiply_tile(a + first * pairs, b + unit * b_unit + column * pairs, out + first * width + column, pairs,
                          width, (float)scale);
    }
}
#endif

/* --- attention's softmax --- */

INLINE vec first_lanes(vec x, int64_t n) { /* the others are 0 */
    vec found = {0};
    memcpy(&found, &x, n * sizeof(float));
    return found;
}

INLINE void causal_softmax_row(float *scores, void *rounded, int64_t seen, int64_t width, int narrow) {
    float largest = row_max_of(scores, seen, 0);
    vec sums = {0};
    EACH_LANES(seen,
        vec power = exp_of(load(scores, i, n, 0) - largest, narrow);
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

/* Scores become probabilities, rounded ones go to `rounded` if it is narrow. Row r sees the keys before
   width - queries + r % queries + 1. */
void causal_softmax(float *scores, void *rounded, int64_t rows, int64_t width, int64_t queries, int64_t narrow,
                    int64_t threads) {
    ROWS(threads)
    for (int64_t row = 0; row < rows; row++) {
        int64_t seen = width - queries + row % queries + 1;
        if (narrow) causal_softmax_row(scores + row * width, row_of(rounded, row * width, 1), seen, width, 1);
        else causal_softmax_row(scores + row * width, rounded, seen, width, 0);
    }
}

INLINE void softmax_input_grads_row(const float *grad, const float *probability, void *result, int64_t width,
                                    int narrow) {
    vec products = {0};
    EACH_LANES(width, products += load(grad, i, n, 0) * load(probability, i, n, 0);)
    float inner = sum_of(products);
    EACH_LANES(width, store(result, i, n, narrow, load(probability, i, n, 0) * (load(grad, i, n, 0) - inner));)
}

/* `result` may be `grad`. */
void softmax_input_grads(const float *grad, const float *probability, void *result, int64_t rows, int64_t width,
                         int64_t narrow, int64_t threads) {
    ROWS(threads)
    for (int64_t row = 0; row < rows; row++) {
        int64_t first = row * width;
        if (narrow) softmax_input_grads_row(grad + first, probability + first, row_of(result, first, 1), width, 1);
        else softmax_input_grads_row(grad + first, probability + first, row_of(result, first, 0), width, 0);
    }
}

/* --- sums --- */

/* total += product, fp32 and bf16 */
void add_narrow(float *total, const void *product, int64_t size, int64_t threads) {
    ROWS(threads)
    for (int64_t first = 0; first < size; first += CHUNK) {
        float *sum = total + first;
        const void *terms = row_of(product, first, 1);
        EACH_LANES(size - first < CHUNK ? size - first : CHUNK,
            store(sum, i, n, 0, load(sum, i, n, 0) + load(terms, i, n, 1));)
    }
}
