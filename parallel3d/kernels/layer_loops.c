/* The C forms of the kernels in torch_norms.py, torch_rotary.py, torch_activations.py and torch_cross_entropy.py. Numbers
   are bf16 (`narrow`) or fp32 in memory, and fp32 in between.

   A row, or a block of rows, belongs to one thread, and sums over rows are cut into blocks by index: with the arithmetic
   of lanes.h, bits depend neither on the processor nor on the number of threads. */

#include "lanes.h"

#define BLOCK_ROWS 32 /* of a weight's gradient; c_norms.py knows it too */
#define CHUNK 4096

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

INLINE void layer_norm_row(const void *x, const void *delta, const float *weight, const float *bias, void *total, void *y,
                           float *mean, float *scale, int64_t width, float eps, int narrow) {
    vec sum = {0}, squares = {0};
    EACH_LANES(width,
        vec t = load(x, i, n, narrow);
        if (delta) {
            t += load(delta, i, n, narrow);
            if (narrow) t = widened(narrowed(t));
            store(total, i, n, narrow, t);
        }
        sum += t;)
    *mean = sum_of(sum) / (float)width;
    EACH_LANES(width,
        vec distance = load(delta ? total : x, i, n, narrow) - *mean;
        if (n < LANES) distance = first_lanes(distance, n);
        squares += distance * distance;)
    *scale = 1.0f / sqrtf(sum_of(squares) / (float)width + eps);
    EACH_LANES(width,
        vec normed = (load(delta ? total : x, i, n, narrow) - *mean) * *scale;
        store(y, i, n, narrow, normed * load(weight, i, n, 0) + load(bias, i, n, 0));)
}

void layer_norm(const void *x, const void *delta, const float *weight, const float *bias, void *total, void *y,
                float *mean, float *scale, int64_t rows, int64_t width, double eps, int64_t narrow, int64_t threads) {
    ROWS(threads)
    for (int64_t row = 0; row < rows; row++) {
        int64_t first = row * width;
#define PASS(kind)                                                                                                    \
    layer_norm_row(row_of(x, first, kind), delta ? row_of(delta, first, kind) : 0, weight, bias, row_of(total, first, kind), \
                   row_of(y, first, kind), mean + row, scale + row, width, (float)eps, kind)
        if (narrow) PASS(1);
        else PASS(0);
#undef PASS
    }
}

INLINE void layer_norm_grads_row(const void *grad, const void *total, const void *residual_grad, const float *weight,
                                 void *total_grad, float *weight_grad, float *bias_grad, float mean, float scale,
                                 int64_t width, int narrow) {
    vec sum = {0}, inner = {0};
    EACH_LANES(width,
        vec g = load(grad, i, n, narrow), product = g * ((load(total, i, n, narrow) - mean) * scale);
        vec factor = load(weight, i, n, 0);
        store(weight_grad, i, n, 0, load(weight_grad, i, n, 0) + product);
        store(bias_grad, i, n, 0, load(bias_grad, i, n, 0) + g);
        sum += g * factor;
        inner += product * factor;)
    float mean_grad = sum_of(sum) / (float)width, mean_product = sum_of(inner) / (float)width;
    EACH_LANES(width,
        vec normed = (load(total, i, n, narrow) - mean) * scale;
        vec found = (load(grad, i, n, narrow) * load(weight, i, n, 0) - mean_grad - normed * mean_product) * scale;
        if (residual_grad) found += load(residual_grad, i, n, narrow);
        store(total_grad, i, n, narrow, found);)
}

/* `partial` (blocks of rows, 2, width), zero before, gets the gradients of weight and bias by blocks. */
void layer_norm_grads(const void *grad, const void *total, const void *residual_grad, const float *weight,
                      const float *mean, const float *scale, void *total_grad, float *partial, int64_t rows,
                      int64_t width, int64_t narrow, int64_t threads) {
    ROWS(threads)
    for (int64_t block = 0; block < (rows + BLOCK_ROWS - 1) / BLOCK_ROWS; block++) {
        int64_t end = (block + 1) * BLOCK_ROWS < rows ? (block + 1) * BLOCK_ROWS : rows;
        float *own = partial + 2 * block * width;
        for (int64_t row = block * BLOCK_ROWS; row < end; row++) {
            int64_t first = row * width;
#define PASS(kind)                                                                                              \
    layer_norm_grads_row(row_of(grad, first, kind), row_of(total, first, kind),                                 \
                         residual_grad ? row_of(residual_grad, first, kind) : 0, weight, row_of(total_grad, first, kind), \
                         own, own + width, mean[row], scale[row], width, kind)
            if (narrow) PASS(1);
            else PASS(0);
#undef PASS
        }
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

/* x sigmoid(2 u), which is x (1 + tanh(u)) / 2, for u = sqrt(2 / pi) (x + 0.044715 x^3); u beyond 87 / 2 changes nothing. */
INLINE vec gelu_share(vec x, int narrow) {
    return sigmoid_of(x * (1.59576912160573071f + 0.0713548162726009022f * (x * x)), narrow);
}

INLINE void gelu_row(const void *x, void *result, int64_t width, int narrow) {
    EACH_LANES(width,
        vec at = load(x, i, n, narrow);
        store(result, i, n, narrow, at * gelu_share(at, narrow));)
}

void gelu_tanh(const void *x, void *result, int64_t rows, int64_t width, int64_t narrow, int64_t threads) {
    ROWS(threads)
    for (int64_t row = 0; row < rows; row++) {
        if (narrow) gelu_row(row_of(x, row * width, 1), row_of(result, row * width, 1), width, 1);
        else gelu_row(row_of(x, row * width, 0), row_of(result, row * width, 0), width, 0);
    }
}

INLINE void gelu_grads_row(const void *grad, const void *x, void *x_grad, void *result, int64_t width, int narrow) {
    EACH_LANES(width,
        vec at = load(x, i, n, narrow), share = gelu_share(at, narrow), found = at * share;
        vec slope = 1.59576912160573071f + 0.214064448817802707f * (at * at);
        store(x_grad, i, n, narrow, load(grad, i, n, narrow) * (share + found * (1.0f - share) * slope));
        store(result, i, n, narrow, found);)
}

void gelu_tanh_grads(const void *grad, const void *x, void *x_grad, void *result, int64_t rows, int64_t width,
                     int64_t narrow, int64_t threads) {
    ROWS(threads)
    for (int64_t row = 0; row < rows; row++) {
        int64_t first = row * width;
#define PASS(kind)                                                                                       \
    gelu_grads_row(row_of(grad, first, kind), row_of(x, first, kind), row_of(x_grad, first, kind),       \
                   row_of(result, first, kind), width, kind)
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
    float target_exp = 0.0f, share = factor / total;
    int is_here = target >= 0 && target < width;
    if (is_here) target_exp = exp_of(load(logits, target, 1, narrow) - largest, narrow)[0];
    EACH_LANES(width,
        store(logits, i, n, narrow, exp_of(load(logits, i, n, narrow) - largest, narrow) * share);)
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
