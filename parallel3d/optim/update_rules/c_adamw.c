/* AdamW's formula in C: `AdamW.update_block` on vectors of fp32, operation by operation. */

#include "../../kernels/lanes.h"

#define NUM_STATES 2

/* `numbers` are those of `AdamW.scalars`. */
INLINE void update_values(vec *weight, vec *states, vec grad, const float *numbers) {
    const float beta1 = numbers[0], rest1 = numbers[1], beta2 = numbers[2], rest2 = numbers[3];
    const float correction = numbers[4], eps = numbers[5], rate = numbers[6], decay = numbers[7];
    states[0] = states[0] * beta1 + grad * rest1;
    states[1] = states[1] * beta2 + (grad * grad) * rest2;
    vec change = states[0] / (root_of(states[1]) * correction + eps) * rate;
    *weight = *weight * decay - change;
}

#include "../../kernels/update_range.h"
