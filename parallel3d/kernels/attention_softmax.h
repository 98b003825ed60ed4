/* The softmax of attention_loops.c and its gradient, row by row. Whatever has AVX-512 contracts multiplications and
   additions, so these do. Scores are those of a block's row: `seen` of them count, up to `width` there are zeros. */

#define MASK(n) ((__mmask16)((1u << (n)) - 1))

/* 2^x for x <= 0, to 3e-6 if the result will be narrowed, else to 1e-7; below -150 it is 0. A NaN stays one. The
   polynomials are minimax ones of the relative error on [-0.5, 0.5]. */
INLINE __m512 power_of_two(__m512 x, int narrow) {
    static const float coarse[] = {9.5701019844e-03f, 5.5917860959e-02f, 2.4024744832e-01f, 6.9312181466e-01f, 9.9999926144e-01f};
    static const float fine[] = {1.5345812085e-04f, 1.3399931291e-03f, 9.6184889574e-03f, 5.5503287768e-02f,
                                 2.4022646891e-01f, 6.9314720574e-01f, 1.0f};
    const float *factors = narrow ? coarse : fine;
    x = _mm512_max_ps(_mm512_set1_ps(-150.0f), x);
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), rest = _mm512_sub_ps(x, whole);
    __m512 found = _mm512_set1_ps(factors[0]);
    for (int i = 1; i < (narrow ? 5 : 7); i++) found = _mm512_fmadd_ps(found, rest, _mm512_set1_ps(factors[i]));
    return _mm512_scalef_ps(found, whole);
}

INLINE float largest_score(const float *scores, int64_t seen) {
    __m512 first = _mm512_set1_ps(-INFINITY), second = first;
    int64_t i = 0;
    for (; i + 2 * LANES <= seen; i += 2 * LANES) {
        first = _mm512_max_ps(first, _mm512_loadu_ps(scores + i));
        second = _mm512_max_ps(second, _mm512_loadu_ps(scores + i + LANES));
    }
    for (; i < seen; i += LANES) {
        __mmask16 mask = seen - i < LANES ? MASK(seen - i) : MASK(LANES);
        first = _mm512_mask_max_ps(first, mask, first, _mm512_maskz_loadu_ps(mask, scores + i));
    }
    return _mm512_reduce_max_ps(_mm512_max_ps(first, second));
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
    __m512 factors = _mm512_set1_ps(factor), largest = _mm512_set1_ps(factor * largest_score(scores, seen));
    __m512 sums = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += LANES) {
        __m512 power = _mm512_setzero_ps();
        if (i < seen) power = power_of_two(_mm512_fmsub_ps(_mm512_loadu_ps(scores + i), factors, largest), narrow);
        if (seen - i < LANES && i < seen) power = _mm512_maskz_mov_ps(MASK(seen - i), power);
        sums = _mm512_add_ps(sums, power);
        if (narrow) STORE_NARROW(rounded + i, power);
        else _mm512_storeu_ps(scores + i, power);
    }
    return 1.0f / sum_of((vec)sums);
}

/* Scores become exp(scale * (score - the largest)) in place. Stores 1 over their sum, and the sum over probability times
   its gradient. */
INLINE void softmax_sums(float *scores, const float *grad, float scale, int64_t seen, int64_t width, float *share,
                         float *inner, int narrow) {
    float factor = scale * 1.44269504088896341f;
    __m512 factors = _mm512_set1_ps(factor), largest = _mm512_set1_ps(factor * largest_score(scores, seen));
    __m512 sums = _mm512_setzero_ps(), products = sums;
    int64_t i = 0;
    for (; i < seen; i += LANES) {
        __m512 power = power_of_two(_mm512_fmsub_ps(_mm512_loadu_ps(scores + i), factors, largest), narrow);
        if (seen - i < LANES) power = _mm512_maskz_mov_ps(MASK(seen - i), power);
        _mm512_storeu_ps(scores + i, power);
        sums = _mm512_add_ps(sums, power);
        products = _mm512_fmadd_ps(power, _mm512_loadu_ps(grad + i), products);
    }
    memset(scores + i, 0, (width - i) * sizeof(float));
    *share = 1.0f / sum_of((vec)sums);
    *inner = sum_of((vec)products) * *share;
}

/* Of two rows, `stride` apart, of powers and the gradients of their probabilities p: p, and p (grad - inner). In fp32 both
   are in place; in bf16 pairs of the two rows go to the pair arrays, rows of the second one to `rounded`. */
INLINE void softmax_grads(float *powers, float *grad, const float *share, const float *inner, uint32_t *pairs,
                          uint32_t *grad_pairs, uint16_t *rounded, int64_t stride, int64_t width, int narrow) {
    __m512 shares[2], inners[2], found[2], grads[2];
    for (int row = 0; row < 2; row++) shares[row] = _mm512_set1_ps(share[row]), inners[row] = _mm512_set1_ps(inner[row]);
#ifdef __AVX512BF16__
    uint16_t order[2 * LANES];
    for (int i = 0; i < LANES; i++) order[2 * i] = i, order[2 * i + 1] = LANES + i;
    __m512i alternate = _mm512_loadu_si512(order);
#endif
    for (int64_t i = 0; i < width; i += LANES) {
        for (int row = 0; row < 2; row++) {
            found[row] = _mm512_mul_ps(_mm512_loadu_ps(powers + row * stride + i), shares[row]);
            grads[row] = _mm512_sub_ps(_mm512_loadu_ps(grad + row * stride + i), inners[row]);
            grads[row] = _mm512_mul_ps(grads[row], found[row]);
        }
        if (!narrow) {
            for (int row = 0; row < 2; row++) {
                _mm512_storeu_ps(powers + row * stride + i, found[row]);
                _mm512_storeu_ps(grad + row * stride + i, grads[row]);
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
