/* Vectors of 16 numbers in fp32 whose multiplications and additions are contracted: a register of AVX-512, or two of AVX2,
   by the same operations in the same order. */

#ifdef __AVX512BW__

#define ROW_VECTORS 4 /* of a product's tile, all of whose sums are in registers */
#define MASK(n) ((__mmask16)((1u << (n)) - 1))

typedef __m512 wide;

INLINE wide wide_of(float x) { return _mm512_set1_ps(x); }
INLINE wide wide_of_bits(uint32_t x) { return (wide)_mm512_set1_epi32((int)x); }
INLINE wide wide_at(const void *place) { return _mm512_loadu_ps(place); }
INLINE void put(void *place, wide x) { _mm512_storeu_ps(place, x); }
INLINE wide plus(wide a, wide b) { return _mm512_add_ps(a, b); }
INLINE wide minus(wide a, wide b) { return _mm512_sub_ps(a, b); }
INLINE wide times(wide a, wide b) { return _mm512_mul_ps(a, b); }
INLINE wide times_plus(wide a, wide b, wide c) { return _mm512_fmadd_ps(a, b, c); }
INLINE wide times_minus(wide a, wide b, wide c) { return _mm512_fmsub_ps(a, b, c); }
INLINE wide wide_max(wide a, wide b) { return _mm512_max_ps(a, b); } /* the second one if one is NaN */
INLINE wide whole_of(wide x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE wide times_power(wide x, wide power) { return _mm512_scalef_ps(x, power); } /* x 2^power, a whole number */

/* The first n lanes; the others are those of `rest`. */
INLINE wide first_of(wide x, int64_t n, wide rest) { return _mm512_mask_mov_ps(rest, MASK(n), x); }
INLINE float wide_sum(wide x) { return sum_of((vec)x); }
INLINE float wide_largest(wide x) { return _mm512_reduce_max_ps(x); }

#else

#define ROW_VECTORS 1

typedef struct { __m256 low, high; } wide;

INLINE wide wide_of(float x) { return (wide){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE wide wide_of_bits(uint32_t x) {
    __m256 bits = (__m256)_mm256_set1_epi32((int)x);
    return (wide){bits, bits};
}
INLINE wide wide_at(const void *place) {
    return (wide){_mm256_loadu_ps(place), _mm256_loadu_ps((const float *)place + LANES / 2)};
}
INLINE void put(void *place, wide x) {
    _mm256_storeu_ps(place, x.low);
    _mm256_storeu_ps((float *)place + LANES / 2, x.high);
}
INLINE wide plus(wide a, wide b) { return (wide){_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
INLINE wide minus(wide a, wide b) { return (wide){_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
INLINE wide times(wide a, wide b) { return (wide){_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
INLINE wide times_plus(wide a, wide b, wide c) {
    return (wide){_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
INLINE wide times_minus(wide a, wide b, wide c) {
    return (wide){_mm256_fmsub_ps(a.low, b.low, c.low), _mm256_fmsub_ps(a.high, b.high, c.high)};
}
INLINE wide wide_max(wide a, wide b) { return (wide){_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }

INLINE wide whole_of(wide x) {
    return (wide){_mm256_round_ps(x.low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                  _mm256_round_ps(x.high, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

/* By two factors, so that a result below the normal numbers is rounded once. */
INLINE __m256 times_power_of_half(__m256 x, __m256 power) {
    __m256i whole = _mm256_cvtps_epi32(power), first = _mm256_srai_epi32(whole, 1);
    __m256i second = _mm256_sub_epi32(whole, first), bias = _mm256_set1_epi32(127);
    x = _mm256_mul_ps(x, (__m256)_mm256_slli_epi32(_mm256_add_epi32(first, bias), 23));
    return _mm256_mul_ps(x, (__m256)_mm256_slli_epi32(_mm256_add_epi32(second, bias), 23));
}
INLINE wide times_power(wide x, wide power) {
    return (wide){times_power_of_half(x.low, power.low), times_power_of_half(x.high, power.high)};
}

INLINE __m256 lanes_before(int64_t n, __m256i lanes) {
    return (__m256)_mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), lanes);
}
INLINE wide first_of(wide x, int64_t n, wide rest) {
    __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return (wide){_mm256_blendv_ps(rest.low, x.low, lanes_before(n, lanes)),
                  _mm256_blendv_ps(rest.high, x.high, lanes_before(n - LANES / 2, lanes))};
}
INLINE float wide_sum(wide x) { return sum_of_eight(_mm256_add_ps(x.low, x.high)); }
INLINE float wide_largest(wide x) {
    __m256 eight = _mm256_max_ps(x.low, x.high);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

#endif

/* x (16, 16), `stride` elements apart, -> out (16, 16), turned. */
#ifdef __AVX512BW__
INLINE void turn(const uint32_t *x, int64_t stride, uint32_t *out, int64_t out_stride) {
    ivec lane, rows[LANES];
    for (int i = 0; i < LANES; i++) lane[i] = i, rows[i] = (ivec)_mm512_loadu_si512(x + i * stride);
#pragma GCC unroll 4
    for (int half = 1; half < LANES; half *= 2) {
        ivec from_b = lane + (((lane & half) != 0) & (LANES - half)); /* the two off-diagonal ones of each four squares */
        __m512i low = (__m512i)from_b, high = (__m512i)(from_b + half); /* change places */
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            if (!(i & half)) {
                __m512i a = (__m512i)rows[i], b = (__m512i)rows[i + half];
                rows[i] = (ivec)_mm512_permutex2var_epi32(a, low, b);
                rows[i + half] = (ivec)_mm512_permutex2var_epi32(a, high, b);
            }
    }
    for (int i = 0; i < LANES; i++) _mm512_storeu_si512(out + i * out_stride, (__m512i)rows[i]);
}
#else
/* x (8, 8) -> out (8, 8), turned. */
INLINE void turn_eight(const uint32_t *x, int64_t stride, uint32_t *out, int64_t out_stride) {
    __m256 rows[8], pairs[8], fours[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) rows[i] = _mm256_loadu_ps((const float *)x + i * stride);
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4)
#pragma GCC unroll 2
        for (int side = 0; side < 2; side++) {
            __m256 above = pairs[i + side], below = pairs[i + 2 + side];
            fours[i + 2 * side] = _mm256_shuffle_ps(above, below, 0x44);
            fours[i + 2 * side + 1] = _mm256_shuffle_ps(above, below, 0xEE);
        }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps((float *)out + i * out_stride, _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20));
        _mm256_storeu_ps((float *)out + (i + 4) * out_stride, _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31));
    }
}

INLINE void turn(const uint32_t *x, int64_t stride, uint32_t *out, int64_t out_stride) {
    for (int row = 0; row < LANES; row += 8)
        for (int i = 0; i < LANES; i += 8) turn_eight(x + row * stride + i, stride, out + i * out_stride + row, out_stride);
}
#endif
