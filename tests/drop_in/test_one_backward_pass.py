"""Backward passes that an elastic step has no place for: named in the first one, never left out of the gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from parallel3d.elastic.drop_in.elastic_loop import CURRENT, EARLY_UPDATE, DataParallel, Sampler, steps
from parallel3d.elastic.drop_in.gradient_sums import OUTSIDE, TOO_LATE
from parallel3d.errors import UserError
from parallel3d.inprocess.world import ThreadWorld, run_threads
from tests.support.loop_threads import NUM_FEATURES, LoopSpec, LoopWorld, Numbers

Kind = Literal["plain", "steps", "exact steps"]
Compute = Callable[["Net", Any, Any, Tensor, Tensor], None]
"""What a script makes of one batch: network, wrapped model, optimizer, x, y."""


class Net(nn.Module):
    """Two layers, with checkpoints around none of them, the first or the last."""

    def __init__(self, around: str = "none"):
        super().__init__()
        self.first, self.last, self.around = nn.Linear(NUM_FEATURES, 5).double(), nn.Linear(5, 1).double(), around
        generator = torch.Generator().manual_seed(3)
        for parameter in self.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self._layer("first", x.clone().requires_grad_()))
        return self._layer("last", x).squeeze(1)

    def _layer(self, name: str, x: Tensor) -> Tensor:
        layer = getattr(self, name)
        return checkpoint(layer, x, use_reentrant=True) if name == self.around else layer(x)


def loss_of(output: Tensor, y: Tensor) -> Tensor:
    return (output - y).square().mean()


def once(network: Net, model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
    loss_of(model(x), y).backward()


def twice(network: Net, model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
    output = model(x)
    loss_of(output, y).backward(retain_graph=True)
    (0.5 * output.square().mean()).backward()


def sharpness_aware(network: Net, model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
    once(network, model, optimizer, x, y)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.05)
    once(network, model, optimizer, x, y)


def by_closure(network: Net, model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
    def closure() -> Tensor:
        loss = loss_of(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)


def step_early(network: Net, model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
    once(network, model, optimizer, x, y)
    optimizer.step()


def make_optimizer(network: Net, compute: Compute) -> torch.optim.Optimizer:
    if compute is by_closure:
        return torch.optim.LBFGS(network.parameters(), max_iter=3)
    return torch.optim.SGD(network.parameters(), lr=0.1)


def trained(kind: Kind, compute: Compute, *, around: str = "none", num_workers: int = 1) -> Net:
    """A worker's network after two epochs of two steps."""
    loops = LoopWorld(LoopSpec(num_workers=num_workers))
    networks: dict[int, Net] = {}

    def work(rank: int, world: ThreadWorld) -> None:
        CURRENT.set(session := loops.open_session(rank))
        network = networks[rank] = Net(around)
        optimizer = make_optimizer(network, compute)
        model = DataParallel(network, optimizer, sums="exact" if kind == "exact steps" else "float")
        data, size = Numbers(8, torch.float64), 4 // num_workers
        if kind == "plain":
            sampler = Sampler(data, slot_size=size, on_failure="drop", shuffle=False)
            loader: DataLoader[Any] = DataLoader(data, size, sampler=sampler)  # type: ignore[arg-type]
            for _ in range(2):
                for _, x, y in loader:
                    optimizer.zero_grad()
                    compute(network, model, optimizer, x, y)
                    if compute is not by_closure:
                        optimizer.step()
        else:
            for step in steps(Sampler(data, batch_size=4, slot_size=size, shuffle=False), epochs=2):
                for _, x, y in step:
                    compute(network, model, optimizer, x, y)
                optimizer.step()
        session.end()

    run_threads(num_workers, work, world=loops.world)
    return networks[0]


def in_one_process(compute: Compute) -> Net:
    network, data = Net(), Numbers(8, torch.float64)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for _ in range(2):
        for half in (slice(0, 4), slice(4, 8)):
            optimizer.zero_grad()
            compute(network, network, optimizer, data.x[half], data.y[half])
            optimizer.step()
    return network


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize(
    "kind, compute, around, message",
    [
        ("plain", twice, "none", OUTSIDE),
        ("plain", sharpness_aware, "none", OUTSIDE),
        ("plain", by_closure, "none", OUTSIDE),
        ("plain", once, "last", OUTSIDE),
        ("steps", twice, "none", TOO_LATE),
        ("steps", sharpness_aware, "none", TOO_LATE),
        ("steps", by_closure, "none", EARLY_UPDATE),
        ("exact steps", step_early, "none", EARLY_UPDATE),
    ],
)
def test_it_is_refused(kind: Kind, compute: Compute, around: str, message: str, num_workers: int) -> None:
    with pytest.raises(UserError) as error:
        trained(kind, compute, around=around, num_workers=num_workers)
    assert str(error.value) == message


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize(
    "kind, compute, around",
    [
        ("plain", once, "none"),
        ("plain", once, "first"),
        ("steps", once, "none"),
        ("steps", once, "first"),
        ("steps", once, "last"),
        ("exact steps", twice, "none"),
        ("exact steps", once, "last"),
    ],
)
def test_what_is_not_refused_is_right(kind: Kind, compute: Compute, around: str, num_workers: int) -> None:
    """Up to the order of sums in fp64."""
    network = trained(kind, compute, around=around, num_workers=num_workers)
    for ours, right in zip(network.parameters(), in_one_process(compute).parameters()):
        torch.testing.assert_close(ours, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("where", ["before the loop", "after a step", "after the loop"])
def test_outside_of_a_step(where: str) -> None:
    """The hooks would take these gradients, and the script's own optimizer would find none."""
    loops = LoopWorld(LoopSpec(num_workers=1))

    def work(rank: int, world: ThreadWorld) -> None:
        CURRENT.set(loops.open_session(rank))
        network, data = Net(), Numbers(4, torch.float64)
        model = DataParallel(network, optimizer := torch.optim.SGD(network.parameters(), lr=0.1))
        if where != "before the loop":
            for step in steps(Sampler(data, batch_size=4, slot_size=4)):
                for _, x, y in step:
                    loss_of(model(x), y).backward()
                optimizer.step()
                if where == "after a step":
                    break
        with pytest.raises(UserError, match="outside of an elastic step"):
            loss_of(network(data.x), data.y).backward()

    run_threads(1, work, world=loops.world)
