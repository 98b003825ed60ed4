/* The update of a range as one loop over memory: widens, applies a rule's formula, rounds, stores and measures.

   A rule's file (optim/update_rules/c_<rule>.c) defines NUM_STATES and

       INLINE void update_values(vec *weight, vec *states, vec grad, const float *numbers)

   and includes this one then; of zeros it makes zeros, which fill up the last vector. It has the bits of the torch form (optim/updater.py): every operation is one of IEEE 754,
   none is contracted with another, and noise is a function of an element's global index (random_keys.py). */

#define ALIGNMENT 16 /* update_table.py has these */
#define COLUMNS 10
#define QUIET_NAN 0x7FC0

typedef uint64_t words8 __attribute__((vector_size(64)));

typedef struct {
    int64_t first_program, start, stop, origin, width, stride, shift, is_counted;
    uint64_t first_key, second_key;
} Piece;

_Static_assert(sizeof(Piece) == COLUMNS * sizeof(int64_t), "update_table.py lays out the rows");

typedef struct {
    void *weights, *states, *copy;
    const void *grads;
    const float *numbers;
    float grad_scale;
    int64_t row_length; /* of the states, in elements */
    int64_t variance;   /* the state whose root is measured; none: -1 */
    int measures;
} Range;

typedef struct {
    vec squares, roots, largest;
} Measured;

INLINE words8 mixed(words8 x, uint64_t second_key) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u ^ second_key;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* 16 random bits for each value of the elements `index` to `index` + 15: of the weight, and of up to three states. */
INLINE void draw_noise(uvec *noise, uint64_t index, const Piece *piece) {
    const words8 steps = {0, 1, 2, 3, 4, 5, 6, 7};
    words8 start = (steps + index) * 0x9E3779B97F4A7C15u + piece->first_key;
    uvec first = (uvec)mixed(start, piece->second_key);
    uvec second = (uvec)mixed(start + 8 * 0x9E3779B97F4A7C15u, piece->second_key);
    uvec low = __builtin_shufflevector(first, second, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    uvec high = __builtin_shufflevector(first, second, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    noise[0] = low & 0xFFFF, noise[1] = low >> 16, noise[2] = high & 0xFFFF, noise[3] = high >> 16;
}

INLINE halves rounded_by(vec value, uvec noise) {
    uvec is_nan = (uvec)(value != value);
    return short_of(((((uvec)value + noise) >> 16) & ~is_nan) | (QUIET_NAN & is_nan));
}

INLINE uvec nearest_of(vec value) {
    uvec bits = (uvec)value;
    return 0x7FFF + ((bits >> 16) & 1);
}

INLINE void store_halves(void *array, int64_t i, int64_t n, halves x) {
    if (n >= LANES) memcpy((uint16_t *)array + i, &x, sizeof x);
    else memcpy((uint16_t *)array + i, &x, n * 2);
}

/* Stores a value in the array's format and returns what was stored. */
INLINE vec store_rounded(void *array, int64_t i, int64_t n, vec value, uvec noise, int narrow) {
    if (narrow) {
        halves x = rounded_by(value, noise);
        store_halves(array, i, n, x);
        return widened(x);
    }
    store(array, i, n, 0, value);
    return value;
}

INLINE void update_lanes(const Range *range, int64_t i, int64_t n, uint64_t index, const Piece *piece,
                         Measured *measured, int narrow, int narrow_grads, int stochastic) {
    vec weight = load(range->weights, i, n, narrow), states[NUM_STATES + 1];
    vec grad = load(range->grads, i, n, narrow_grads) * range->grad_scale;
    for (int k = 0; k < NUM_STATES; k++) states[k] = load(range->states, k * range->row_length + i, n, narrow);
    update_values(&weight, states, grad, range->numbers);
    uvec noise[4];
    if (stochastic) draw_noise(noise, index, piece);
    vec stored = store_rounded(range->weights, i, n, weight, stochastic ? noise[0] : nearest_of(weight), narrow);
    if (range->copy) store_halves(range->copy, i, n, rounded_by(weight, nearest_of(weight)));
    vec root = {0};
    for (int k = 0; k < NUM_STATES; k++) {
        uvec own = stochastic ? noise[k + 1] : nearest_of(states[k]);
        vec state = store_rounded(range->states, k * range->row_length + i, n, states[k], own, narrow);
        if (range->measures && k == range->variance) root = root_of(state);
    }
    if (range->measures && piece->is_counted) {
        measured->squares += stored * stored;
        measured->roots += root;
        measured->largest = larger_of(measured->largest, root);
    }
}

INLINE void update_program(const Range *range, int64_t at, int64_t end, const Piece *piece, Measured *measured,
                           int narrow, int narrow_grads, int stochastic) {
    while (at < end) {
        int64_t element = at - piece->origin, row = element / piece->width, column = element % piece->width;
        int64_t run = piece->width - column < end - at ? piece->width - column : end - at;
        uint64_t index = (uint64_t)(row * piece->stride + column + piece->shift);
        EACH_LANES(run, update_lanes(range, at + i, n, index + (uint64_t)i, piece, measured, narrow, narrow_grads, stochastic);)
        at += run;
    }
}

INLINE const Piece *piece_of(const Piece *pieces, int64_t num_pieces, int64_t program) {
    int64_t low = 0, high = num_pieces;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (pieces[middle].first_program <= program) low = middle;
        else high = middle;
    }
    return pieces + low;
}

/* `partials` (3, num_programs) gets sums of squared weights, sums of roots and the largest root, if it is not null. */
void update_range(void *weights, void *states, const void *grads, void *copy, float *partials, const Piece *pieces,
                  int64_t num_pieces, int64_t num_programs, int64_t block, int64_t row_length, const float *numbers,
                  double grad_scale, int64_t variance, int64_t narrow, int64_t narrow_grads, int64_t stochastic,
                  int64_t threads) {
    const Range range = {weights, states, copy, grads, numbers, (float)grad_scale, row_length, variance, partials != 0};
    ROWS(threads)
    for (int64_t program = 0; program < num_programs; program++) {
        const Piece *piece = piece_of(pieces, num_pieces, program);
        int64_t tile = piece->start / ALIGNMENT * ALIGNMENT + (program - piece->first_program) * block;
        int64_t at = tile > piece->start ? tile : piece->start;
        int64_t end = tile + block < piece->stop ? tile + block : piece->stop;
        Measured measured = {{0}, {0}, {0}};
#define PASS(...) update_program(&range, at, end, piece, &measured, __VA_ARGS__)
        if (narrow && stochastic && narrow_grads) PASS(1, 1, 1);
        else if (narrow && stochastic) PASS(1, 0, 1);
        else if (narrow && narrow_grads) PASS(1, 1, 0);
        else if (narrow) PASS(1, 0, 0);
        else if (narrow_grads) PASS(0, 1, 0);
        else PASS(0, 0, 0);
#undef PASS
        if (!partials) continue;
        partials[program] = sum_of(measured.squares);
        partials[num_programs + program] = sum_of(measured.roots);
        partials[2 * num_programs + program] = largest_of(measured.largest);
    }
}
