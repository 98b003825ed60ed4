/* Arithmetic on vectors of 16 lanes, for the loops of this folder: numbers are bf16 (`narrow`) or fp32 in memory, and fp32
   in between. Compiled without contracted multiplications and additions, and with sums that are cut into lanes by index
   alone, it gives the same bits on all processors. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define LANES 16
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

/* To the nearest, ties to even; what is too small for a normal number becomes 0, as the instruction for it has it. NaNs
   stay NaNs: results of arithmetic on bf16 numbers have no bits set below bf16's that a carry could start from. */
INLINE halves narrowed(vec x) {
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
    return (halves)_mm512_cvtneps_pbh((__m512)x);
#else
    uvec bits = (uvec)x, is_normal = (uvec)((ivec)(0 - (bits & 0x7F800000)) >> 31); /* GCC 12 compares lane by lane */
    return short_of(((bits + 0x7FFF + ((bits >> 16) & 1)) & (is_normal | 0x80000000)) >> 16);
#endif
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

INLINE vec first_lanes(vec x, int64_t n) { /* the others are 0 */
    vec found = {0};
    memcpy(&found, &x, n * sizeof(float));
    return found;
}

INLINE void *row_of(const void *array, int64_t first, int narrow) {
    return (char *)array + first * (narrow ? 2 : 4);
}

#ifdef __AVX2__
INLINE float sum_of_eight(__m256 eight) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
#endif

/* Always in this order. */
INLINE float sum_of(vec x) {
#ifdef __AVX512DQ__
    __m512 all = (__m512)x;
    return sum_of_eight(_mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1)));
#else
    float part[LANES];
    memcpy(part, &x, sizeof x);
    for (int half = LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++) part[lane] += part[lane + half];
    return part[0];
#endif
}

/* The second one if one is NaN. */
#ifdef __AVX512BW__
INLINE vec larger_of(vec a, vec b) { return (vec)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vec smaller_of(vec a, vec b) { return (vec)_mm512_min_ps((__m512)a, (__m512)b); }
#elif defined(__AVX2__) /* GCC 12 compares lane by lane */
#define EACH_HALF(found, function, a, b)                                        \
    for (int half = 0; half < 2; half++) {                                      \
        __m256 x, y;                                                            \
        memcpy(&x, (char *)&a + half * 32, 32), memcpy(&y, (char *)&b + half * 32, 32); \
        x = function(x, y);                                                     \
        memcpy((char *)&found + half * 32, &x, 32);                             \
    }
INLINE vec larger_of(vec a, vec b) {
    vec found;
    EACH_HALF(found, _mm256_max_ps, a, b)
    return found;
}
INLINE vec smaller_of(vec a, vec b) {
    vec found;
    EACH_HALF(found, _mm256_min_ps, a, b)
    return found;
}
#else
INLINE vec where(ivec condition, vec yes, vec no) { return (vec)(((ivec)yes & condition) | ((ivec)no & ~condition)); }
INLINE vec larger_of(vec a, vec b) { return where(a > b, a, b); }
INLINE vec smaller_of(vec a, vec b) { return where(a < b, a, b); }
#endif

INLINE vec root_of(vec x) {
#ifdef __AVX512F__
    return (vec)_mm512_sqrt_ps((__m512)x);
#else
    for (int lane = 0; lane < LANES; lane++) x[lane] = sqrtf(x[lane]);
    return x;
#endif
}

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
