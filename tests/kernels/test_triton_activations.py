"""SwiGLU, GeGLU and GELU by Triton give what torch gives in fp64, on inputs of every size."""

import pytest
import torch

from parallel3d.kernels.layer_kernels import TORCH_KERNELS, layer_kernels
from tests.support.kernel_forms import DEVICE, DTYPES, assert_near, draw

pytest.importorskip("triton")
pytestmark = [*([pytest.mark.gpu] if DEVICE == "cuda" else []), pytest.mark.filterwarnings("ignore::RuntimeWarning")]
EDGES = [0.0, -0.0, 1e-30, 30.0, -30.0, 200.0, -200.0]


@pytest.mark.each_value
@pytest.mark.parametrize("num_rows, width", [(3, 1024), (2, 1500), (5, 24)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["silu_times", "gelu_times"])
def test_gates(name, dtype, num_rows, width):
    gate_up, grad = draw(num_rows, 2 * width, dtype=dtype, scale=3.0), draw(num_rows, width, dtype=dtype, seed=2)
    gate_up[0, : len(EDGES)] = torch.tensor(EDGES, device=DEVICE)
    ours, exact = (getattr(kernels, name) for kernels in (layer_kernels("triton"), TORCH_KERNELS))
    terms = 8 if name == "gelu_times" else 0  # torch subtracts from 1 far from 0
    assert not ours.keeps_result
    assert_near(ours.forward(gate_up), exact.forward(gate_up.double()), terms=terms)
    found, again = ours.backward(grad, gate_up, None)
    expected, _ = exact.backward(grad.double(), gate_up.double(), None)
    assert_near(found, expected, terms=max(terms, 1))
    assert torch.equal(again, ours.forward(gate_up))


@pytest.mark.each_value
@pytest.mark.parametrize("form", ["none", "tanh"])
@pytest.mark.parametrize("size", [(3, 1024), (2, 1500), (5, 24)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu(dtype, size, form):
    x, grad = draw(*size, dtype=dtype, scale=3.0), draw(*size, dtype=dtype, seed=2)
    x[0, : len(EDGES)] = torch.tensor(EDGES, device=DEVICE)
    ours, exact = layer_kernels("triton").gelu[form], TORCH_KERNELS.gelu[form]
    assert_near(ours.forward(x), exact.forward(x.double()), terms=8)  # torch subtracts from 1 far from 0
    found, again = ours.backward(grad, x, None)
    expected, _ = exact.backward(grad.double(), x.double(), exact.forward(x.double()))
    assert_near(found, expected, terms=8)
    assert torch.equal(again, ours.forward(x))
