"""The state that a joiner takes from a worker which waits for its optimizer's step; what a proposal leaves alone."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from parallel3d.elastic.drop_in.gradient_sums import GradientSums
from parallel3d.elastic.drop_in.loop_state import LoopState
from parallel3d.elastic.drop_in.progress import Progress, StepEntry
from parallel3d.elastic.drop_in.sample_order import SampleOrder
from parallel3d.elastic.protocol.membership import GenerationRecord
from parallel3d.parallel.grid import Grid
from parallel3d.parallel.group import SoloGroup
from parallel3d.precision.fixed_point import plan_fixed_point

ORDER = SampleOrder(num_samples=8, slot_size=2, batch_size=4)


def make_state(weight: float) -> tuple[LoopState, nn.Linear]:
    layer = nn.Linear(2, 1)
    nn.init.constant_(layer.weight, weight)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    gradients = GradientSums(layer.parameters(), exact=False)
    state = LoopState(gradients=gradients, stateful=(layer, optimizer), order=ORDER, workers=(0, 1))
    state.progress = Progress(samples=ORDER.begin([0, 1]))
    return state, layer


def settle(state: LoopState, layer: nn.Linear) -> None:
    """Brings it to where the first step is committed and its gradients wait for the optimizer."""
    assert state.gradients is not None
    state.gradients.begin_step(4, plan_fixed_point(num_tokens=4, num_terms=2))
    state.gradients.begin_slot(4.0, None)
    layer(torch.tensor([[3.0, 5.0]])).sum().backward()
    state.gradients.end_slot()
    state.gradients.reduce(SoloGroup())
    state.apply_entry(StepEntry(step=1, num_workers=2, num_samples=4).encode())


def test_a_joiner_takes_the_gradients_that_wait_for_the_optimizer() -> None:
    source, source_layer = make_state(0.5)
    settle(source, source_layer)
    joiner, layer = make_state(0.25)
    joiner.progress = None
    joiner.load_state(source.encode_state())
    assert joiner.is_settled and (joiner.position, joiner.weights_step) == (1, 0)
    assert layer.weight.equal(source_layer.weight)
    assert layer.weight.grad is not None and layer.weight.grad.tolist() == [[3.0, 5.0]]


def test_a_joiner_learns_that_the_others_have_left_their_loops() -> None:
    source, _ = make_state(0.5)
    for is_over in (False, True):
        assert source.progress is not None
        source.progress = replace(source.progress, is_over=is_over)
        joiner, _ = make_state(0.25)
        joiner.load_state(source.encode_state())
        assert joiner.progress is not None and joiner.progress.is_over is is_over


def test_a_proposed_generation_changes_nothing() -> None:
    state, _ = make_state(0.5)
    before = state.progress
    record = GenerationRecord(
        generation=1, grid=Grid.uniform(pp_size=1, dp_size=1, tp_size=1), previous=None, members=(0,)
    )
    digest = state.begin_generation(record, is_proposed=True)
    assert state.progress is before and state.workers == (0, 1)
    assert state.begin_generation(record, is_proposed=False) == digest
    assert state.progress is not before and state.workers == (0,)
