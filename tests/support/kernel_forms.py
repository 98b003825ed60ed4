"""Draws inputs for both forms of a kernel, and measures how far a result is from the exact one."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Triton's kernels run on a GPU, or on the CPU in its interpreter."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

# One rounding is half a unit in the last place. Sums of fp32 numbers differ by their order and by exp's last bits.
ULPS = {torch.bfloat16: 1, torch.float16: 1, torch.float32: 16, torch.float64: 64}


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
