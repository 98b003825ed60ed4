"""The random bits of Triton's kernels are those of random_keys, and so is the rounding with them."""

import pytest
import torch

from parallel3d.precision.stochastic_rounding import noise_of, round_to_bf16
from parallel3d.random_keys import bits, key_of
from tests.support.kernel_compiler import KernelCase, compile_kernels
from tests.support.kernel_forms import DEVICE

triton = pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
EDGES = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3.4e38, -3.4e38, 1e-40, 1.0, 1.0000001]


def rounded(values, index, key, part, block):
    from tests.kernels.triton_examples import round_all

    words = torch.empty(len(values), dtype=torch.int64, device=DEVICE)
    result = torch.empty(len(values), dtype=torch.bfloat16, device=DEVICE)
    grid = (triton.cdiv(len(values), block),)
    values, index = values.to(DEVICE), index.to(DEVICE)
    round_all[grid](values, index, words, result, len(values), key.first, key.second, PART=part, BLOCK=block)
    return words.cpu(), result.cpu()


def assert_same_bits(num_drawn, part, block):
    generator = torch.Generator().manual_seed(part)
    exponents = torch.rand(num_drawn, generator=generator).mul(80).sub(40)
    values = torch.cat([torch.tensor(EDGES), torch.randn(num_drawn, generator=generator) * exponents.exp2()])
    index = torch.cat([torch.arange(len(values) - 3), torch.tensor([-1, 2**62, -(2**62)])])
    key = key_of("a test", part)
    words, result = rounded(values, index, key, part, block)
    assert torch.equal(words, bits(key, index))
    expected = round_to_bf16(values, noise_of(words, part))
    assert torch.equal(result.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("part", range(4))
def test_words_and_rounding(part):
    assert_same_bits(1000, part, block=256)


@pytest.mark.full
@pytest.mark.parametrize("part", range(4))
def test_words_and_rounding_of_a_million(part):
    assert_same_bits(1_000_003 - len(EDGES), part, block=1024 if DEVICE == "cuda" else 1 << 17)


@pytest.mark.full
def test_compiles_for_all_architectures():
    case = KernelCase(
        module="tests.kernels.triton_examples",
        kernel="round_all",
        signature=dict(x="*fp32", index="*i64", words="*i64", result="*bf16", n="i32", first="i64", second="i64"),
        constants=dict(PART=1, BLOCK=1024),
        aligned=("x", "index", "words", "result", "n"),
    )
    for made in compile_kernels([case]):
        assert made.spilled_bytes == made.local_bytes == 0
        assert min(made.accesses("ld") + made.accesses("st")) >= 64
