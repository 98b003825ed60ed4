/* Copies and sums of tensors in memory that several processes share.

   A line that another core has written takes long to arrive, so sums ask for their next lines in time. */

#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { LINE = 64, AHEAD = 2048, NUMBERS_OF_LINE = LINE / 2, PIECE = 1 << 14 }; /* bytes, bytes, numbers, elements */
#define PIECES(threads) _Pragma("omp parallel for schedule(static) num_threads((int)threads)")

/* What a peer reads next need not stay in this core's caches, from which the peer would have to take it. */
static void copy_past_caches(char *to, const char *from, int64_t num_bytes) {
    int64_t i = 0;
#if defined(__AVX__)
    i = (LINE - (intptr_t)to % LINE) % LINE;
    if (i > num_bytes) i = num_bytes;
    memcpy(to, from, i);
    for (; i + LINE <= num_bytes; i += LINE) {
#if defined(__AVX512F__)
        _mm512_stream_si512((void *)(to + i), _mm512_loadu_si512(from + i));
#else
        _mm256_stream_si256((void *)(to + i), _mm256_loadu_si256((const void *)(from + i)));
        _mm256_stream_si256((void *)(to + i + 32), _mm256_loadu_si256((const void *)(from + i + 32)));
#endif
    }
    _mm_sfence(); /* before the counter that publishes them */
#endif
    memcpy(to + i, from + i, num_bytes - i);
}

/* Copies what peers are to read. Past the caches on Intel alone; it was not measured elsewhere. */
void copy_for_peers(char *to, const char *from, int64_t num_bytes, int64_t threads) {
    int passes_caches = 0;
#if defined(__x86_64__)
    passes_caches = __builtin_cpu_is("intel") != 0;
#endif
    PIECES(threads)
    for (int64_t start = 0; start < num_bytes; start += 4 * PIECE) {
        const int64_t piece = num_bytes - start < 4 * PIECE ? num_bytes - start : 4 * PIECE;
        if (passes_caches) copy_past_caches(to + start, from + start, piece);
        else memcpy(to + start, from + start, piece);
    }
}

static inline float widened(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

/* To the nearest, ties to even. NaNs stay NaNs: a sum of bf16 numbers that is none has no bits set below bf16's. */
static inline uint16_t narrowed(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

/* out = a + b; out may be either. */
void add_bf16(uint16_t *out, const uint16_t *a, const uint16_t *b, int64_t size, int64_t threads) {
    PIECES(threads)
    for (int64_t start = 0; start < size; start += PIECE) {
        const int64_t end = size - start < PIECE ? size : start + PIECE;
        int64_t i = start;
        for (; i + NUMBERS_OF_LINE <= end; i += NUMBERS_OF_LINE) {
            __builtin_prefetch((const char *)(a + i) + AHEAD);
            __builtin_prefetch((const char *)(b + i) + AHEAD);
#pragma GCC ivdep
            for (int64_t j = i; j < i + NUMBERS_OF_LINE; ++j) out[j] = narrowed(widened(a[j]) + widened(b[j]));
        }
        for (; i < end; ++i) out[i] = narrowed(widened(a[i]) + widened(b[i]));
    }
}
