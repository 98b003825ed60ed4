"""Draws inputs for both forms of a kernel, and measures how far a result is from the exact one.

Importing it also makes Triton's interpreter round to bf16 as GPUs do, to the nearest: its own conversion cuts bits off.
"""

from importlib.util import find_spec

import numpy as np
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Triton's kernels run on a GPU, where these tests are marked `gpu`, or on the CPU in its interpreter."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

# One rounding is half a unit in the last place, of a number that was computed in fp32. Those differ by the order of
# sums and by the last bits of exp and erf.
ULPS = {torch.bfloat16: 0.51, torch.float16: 0.51, torch.float32: 16, torch.float64: 64}


def draw(*shape, dtype, seed=1, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype).to(DEVICE)


def assert_near(ours, exact, *, ulps=None, terms=1):
    """Compares with `exact` (fp64), in units in the last place of our format.

    terms: of the sum that each element is, whose terms are of the largest element's size and were added in fp32 or
    wider; where they cancel, what remains has their error.
    """
    assert ours.shape == exact.shape
    wide = torch.promote_types(ours.dtype, torch.float32)
    sum_error = terms * torch.finfo(wide).eps * exact.abs().max()
    unit = torch.finfo(ours.dtype).eps * torch.exp2(exact.abs().clamp_min(torch.finfo(ours.dtype).tiny).log2().floor())
    off = ((ours.double() - exact).abs() - sum_error) / unit
    assert off.max().item() <= (ULPS[ours.dtype] if ulps is None else ulps)


def doubles(*tensors):
    return tuple(tensor.double() for tensor in tensors)


def round_to_nearest_in_the_interpreter():
    """Replaces the interpreter's conversion to bf16 in Triton 3.6 by torch's."""
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def converted(values, source, target, rounding_mode):
        if not target.is_bf16() or source.primitive_bitwidth < 32:
            return convert(values, source, target, rounding_mode)
        narrow = torch.from_numpy(np.ascontiguousarray(values)).bfloat16()
        return narrow.view(torch.int16).numpy().view(np.uint16).reshape(values.shape)

    interpreter._convert_float = converted


if DEVICE == "cpu" and find_spec("triton") is not None:
    round_to_nearest_in_the_interpreter()
