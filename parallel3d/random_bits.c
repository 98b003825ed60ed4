/* Integer loops that torch would run as a dozen passes over memory. They have the bits of their definitions:
   random_keys.bits, and precision/stochastic_rounding.py: round_to_bf16. */

#include <stdint.h>

void random_words(uint64_t *restrict words, const int64_t *restrict index, int64_t n, uint64_t first, uint64_t second) {
    for (int64_t i = 0; i < n; i++) {
        uint64_t x = (uint64_t)index[i] * 0x9E3779B97F4A7C15u + first;
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
        x ^= second;
        x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
        words[i] = x ^ (x >> 31);
    }
}

void round_to_bf16(uint16_t *restrict rounded, const uint32_t *restrict value, const uint64_t *restrict words, int64_t n,
                   int64_t shift) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t upper = (value[i] + ((uint32_t)(words[i] >> shift) & 0xFFFF)) >> 16;
        rounded[i] = (value[i] & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : upper; /* a NaN becomes the quiet NaN */
    }
}
