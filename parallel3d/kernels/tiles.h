/* Tiles, the registers of AMX: 16 rows of 64 bytes, and products of bf16 factors with results in fp32. An element is
   two bf16 numbers that follow each other along the sum. */

#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>

#define TILE_ROWS 16
#define REQUEST_PERMISSION 0x1023 /* of arch_prctl, and the state that is asked for: Linux hands out tiles on request */
#define TILE_DATA 18
#define BARRIER __asm__ volatile("" ::: "memory") /* GCC 12 does not know that tiles read and write memory */

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} Tiles;

/* Whether the kernel lets this process use tiles. */
static int may_use_tiles(void) {
    static int known = -1; /* threads that ask at the same time find the same */
    if (known < 0) known = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return known;
}

/* Sets all tiles of this thread to 16 rows of 64 bytes, and returns what was set before. */
INLINE Tiles begin_tiles(void) {
    Tiles before, ours = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) ours.row_bytes[tile] = 64, ours.rows[tile] = TILE_ROWS;
    _tile_storeconfig(&before);
    BARRIER;
    _tile_loadconfig(&ours);
    return before;
}

INLINE void end_tiles(const Tiles *before) { /* torch's own products may rely on what they have set */
    BARRIER;
    _tile_loadconfig(before);
}

/* out (32, 32) = (out +) a (32, steps) b (steps, 32), strides in elements; steps are a multiple of 16. */
INLINE void multiply_tiles(const uint32_t *a, int64_t a_row, const uint32_t *b, int64_t b_step, float *out,
                           int64_t out_row, int64_t steps, int adds) {
    float *low = out + TILE_ROWS * out_row;
    if (adds) {
        _tile_loadd(0, out, out_row * 4);
        _tile_loadd(1, out + LANES, out_row * 4);
        _tile_loadd(2, low, out_row * 4);
        _tile_loadd(3, low + LANES, out_row * 4);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t s = 0; s < steps; s += LANES) {
        _tile_loadd(6, b + s * b_step, b_step * 4);
        _tile_loadd(4, a + s, a_row * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + s * b_step + LANES, b_step * 4);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a + TILE_ROWS * a_row + s, a_row * 4);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out, out_row * 4);
    _tile_stored(1, out + LANES, out_row * 4);
    _tile_stored(2, low, out_row * 4);
    _tile_stored(3, low + LANES, out_row * 4);
}
#endif
