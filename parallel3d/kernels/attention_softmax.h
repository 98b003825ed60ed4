/* The softmax of attention_loops.c and its gradient, row by row. Processors with AVX-512 or with AVX2 and FMA contract
   multiplications and additions, so these do. Scores are those of a block's row: `seen` of them count, up to `width` there are zeros. */

/* 2^x for x <= 0, to 3e-6 if the result will be narrowed, else to 1e-7; below -150 it is 0. A NaN stays one. The
   polynomials are minimax ones of the relative error on [-0.5, 0.5]. */
INLINE wide power_of_two(wide x, int narrow) {
    static const float coarse[] = {9.5701019844e-03f, 5.5917860959e-02f, 2.4024744832e-01f, 6.9312181466e-01f, 9.9999926144e-01f};
    static const float fine[] = {1.5345812085e-04f, 1.3399931291e-03f, 9.6184889574e-03f, 5.5503287768e-02f,
                                 2.4022646891e-01f, 6.9314720574e-01f, 1.0f};
    const float *factors = narrow ? coarse : fine;
    x = wide_max(wide_of(-150.0f), x);
    wide whole = whole_of(x), rest = minus(x, whole), found = wide_of(factors[0]);
    for (int i = 1; i < (narrow ? 5 : 7); i++) found = times_plus(found, rest, wide_of(factors[i]));
    return times_power(found, whole);
}

INLINE float largest_score(const float *scores, int64_t seen) {
    wide first = wide_of(-INFINITY), second = first;
    int64_t i = 0;
    for (; i + 2 * LANES <= seen; i += 2 * LANES) {
        first = wide_max(first, wide_at(scores + i));
        second = wide_max(second, wide_at(scores + i + LANES));
    }
    for (; i < seen; i += LANES) {
        int64_t n = seen - i < LANES ? seen - i : LANES;
        first = wide_max(first, first_of(wide_at(scores + i), n, first));
    }
    return wide_largest(wide_max(first, second));
}

#ifdef __AVX512BF16__ /* one instruction each; numbers below fp32's normal ones become 0 */
#define STORE_NARROW(place, x) _mm256_storeu_si256((__m256i *)(place), (__m256i)_mm512_cvtneps_pbh(x))
#else
#define STORE_NARROW(place, x)
#endif

/* Scores become exp(scale * (score - the largest)): in place, or rounded to bf16 in `rounded` if it is narrow. Returns 1
   over their sum. */
INLINE float softmax_powers(float *scores, uint16_t *rounded, float scale, int64_t seen, int64_t width, int narrow) {
    float factor = scale * 1.44269504088896341f;
    wide factors = wide_of(factor), largest = wide_of(factor * largest_score(scores, seen)), sums = wide_of(0);
    for (int64_t i = 0; i < width; i += LANES) {
        wide power = wide_of(0);
        if (i < seen) power = power_of_two(times_minus(wide_at(scores + i), factors, largest), narrow);
        if (seen - i < LANES && i < seen) power = first_of(power, seen - i, wide_of(0));
        sums = plus(sums, power);
        if (narrow) STORE_NARROW(rounded + i, power);
        else put(scores + i, power);
    }
    return 1.0f / wide_sum(sums);
}

/* Scores become exp(scale * (score - the largest)) in place. Stores 1 over their sum, and the sum over probability times
   its gradient. */
INLINE void softmax_sums(float *scores, const float *grad, float scale, int64_t seen, int64_t width, float *share,
                         float *inner, int narrow) {
    float factor = scale * 1.44269504088896341f;
    wide factors = wide_of(factor), largest = wide_of(factor * largest_score(scores, seen));
    wide sums = wide_of(0), products = sums;
    int64_t i = 0;
    for (; i < seen; i += LANES) {
        wide power = power_of_two(times_minus(wide_at(scores + i), factors, largest), narrow);
        if (seen - i < LANES) power = first_of(power, seen - i, wide_of(0));
        put(scores + i, power);
        sums = plus(sums, power);
        products = times_plus(power, wide_at(grad + i), products);
    }
    memset(scores + i, 0, (width - i) * sizeof(float));
    *share = 1.0f / wide_sum(sums);
    *inner = wide_sum(products) * *share;
}

/* Of two rows, `stride` apart, of powers and the gradients of their probabilities p: p, and p (grad - inner). In fp32 both
   are in place; in bf16 pairs of the two rows go to the pair arrays, rows of the second one to `rounded`. */
INLINE void softmax_grads(float *powers, float *grad, const float *share, const float *inner, uint32_t *pairs,
                          uint32_t *grad_pairs, uint16_t *rounded, int64_t stride, int64_t width, int narrow) {
    wide shares[2], inners[2], found[2], grads[2];
    for (int row = 0; row < 2; row++) shares[row] = wide_of(share[row]), inners[row] = wide_of(inner[row]);
#ifdef __AVX512BF16__
    uint16_t order[2 * LANES];
    for (int i = 0; i < LANES; i++) order[2 * i] = i, order[2 * i + 1] = LANES + i;
    __m512i alternate = _mm512_loadu_si512(order);
#endif
    for (int64_t i = 0; i < width; i += LANES) {
        for (int row = 0; row < 2; row++) {
            found[row] = times(wide_at(powers + row * stride + i), shares[row]);
            grads[row] = times(minus(wide_at(grad + row * stride + i), inners[row]), found[row]);
        }
        if (!narrow) {
            for (int row = 0; row < 2; row++) {
                put(powers + row * stride + i, found[row]);
                put(grad + row * stride + i, grads[row]);
            }
            continue;
        }
#ifdef __AVX512BF16__
        __m512i both = (__m512i)_mm512_cvtne2ps_pbh(found[1], found[0]), both_grads;
        both_grads = (__m512i)_mm512_cvtne2ps_pbh(grads[1], grads[0]);
        _mm512_storeu_si512(pairs + i, _mm512_permutexvar_epi16(alternate, both));
        _mm512_storeu_si512(grad_pairs + i, _mm512_permutexvar_epi16(alternate, both_grads));
        _mm256_storeu_si256((__m256i *)(rounded + i), _mm512_castsi512_si256(both_grads));
        _mm256_storeu_si256((__m256i *)(rounded + stride + i), _mm512_extracti64x4_epi64(both_grads, 1));
#endif
    }
}
