/* Lion's formula in C: `Lion.update_block` on vectors of fp32, operation by operation. */

#include "../../kernels/lanes.h"

#define NUM_STATES 1

/* `numbers` are those of `Lion.scalars`. */
INLINE void update_values(vec *weight, vec *states, vec grad, const float *numbers) {
    const float beta1 = numbers[0], rest1 = numbers[1], beta2 = numbers[2], rest2 = numbers[3];
    const float rate = numbers[4], decay = numbers[5];
    vec mean = states[0] * beta1 + grad * rest1;
    vec sign = __builtin_convertvector((mean < 0.0f) - (mean > 0.0f), vec); /* 0 for NaN too */
    *weight = *weight * decay - sign * rate;
    states[0] = states[0] * beta2 + grad * rest2;
}

#include "../../kernels/update_range.h"
