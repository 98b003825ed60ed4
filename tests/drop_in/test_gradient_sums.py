"""Gradients of a step: the mean over all its samples, whatever the slots, the workers and the losses of workers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from parallel3d.elastic.drop_in.gradient_sums import GradientSums
from parallel3d.errors import GenerationEnded, UserError
from parallel3d.inprocess.world import ThreadWorld, run_threads
from parallel3d.parallel.group import DoneWork, SoloGroup, Work
from parallel3d.precision.fixed_point import plan_fixed_point

FIXED = plan_fixed_point(num_tokens=16, num_terms=8)
X, Y = (torch.randn(n, generator=torch.Generator().manual_seed(2), dtype=torch.float64).view(12, -1) for n in (36, 12))


def make_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def loss_of(model: nn.Module, samples: slice) -> Tensor:
    return (model(X[samples]) - Y[samples]).square().mean()


def oracle(samples: slice) -> list[Tensor]:
    model = make_model()
    loss_of(model, samples).backward()
    return [parameter.grad for parameter in model.parameters()]  # type: ignore[misc]


def reduced(
    slots_of: list[list[slice]], *, num_samples: int, exact: bool = False, bytes_: int = 60
) -> list[list[Tensor]]:
    """Each worker's gradients after a step."""

    def worker(rank: int, world: ThreadWorld) -> list[Tensor]:
        model = make_model()
        sums = GradientSums(model.parameters(), exact=exact, bucket_bytes=bytes_)
        group = world.make_group(rank)("g/all", tuple(range(len(slots_of))))
        for _ in range(2):  # the sums of the first step are forgotten
            sums.begin_step(num_samples, FIXED)
            for number, slot in enumerate(slots_of[rank]):
                sums.begin_slot(slot.stop - slot.start, group if number == len(slots_of[rank]) - 1 else None)
                loss_of(model, slot).backward()
                sums.end_slot()
            sums.reduce(group)
            sums.publish()
        return [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]

    if len(slots_of) == 1:
        return [worker(0, ThreadWorld(1))]
    return run_threads(len(slots_of), worker)


@pytest.mark.parametrize("bytes_", [1, 60, 10**6])
@pytest.mark.parametrize("exact", [False, True])
def test_uneven_slots_of_three_workers_give_the_mean_over_all_samples(exact: bool, bytes_: int) -> None:
    slots = [[slice(0, 5), slice(5, 6)], [slice(6, 9)], [slice(9, 12)]]
    for gradients in reduced(slots, num_samples=12, exact=exact, bytes_=bytes_):
        for ours, whole in zip(gradients, oracle(slice(0, 12))):
            torch.testing.assert_close(ours, whole, rtol=0, atol=1e-12)


def test_dropped_samples_do_not_count() -> None:
    """A14: the sum over the survivors, divided by their samples."""
    for gradients in reduced([[slice(0, 4)], [slice(4, 8)]], num_samples=8):
        for ours, whole in zip(gradients, oracle(slice(0, 8))):
            torch.testing.assert_close(ours, whole, rtol=0, atol=1e-12)


def test_exact_sums_are_the_same_bits_on_one_worker_and_on_three() -> None:
    alone = reduced([[slice(0, 4), slice(4, 8), slice(8, 12)]], num_samples=12, exact=True)
    others = reduced([[slice(8, 12)], [slice(0, 4)], [slice(4, 8)]], num_samples=12, exact=True)
    assert all(a.equal(b) for other in others for a, b in zip(alone[0], other))


class LoggedGroup(SoloGroup):
    """A group of one that notes when reductions begin."""

    def __init__(self, log: list[str]):
        super().__init__()
        self._log = log

    def all_reduce_async(self, tensor: Tensor) -> Work:
        self._log.append(f"reduce {tensor.numel()}")
        return DoneWork()


def test_the_reduction_begins_within_the_last_backward_pass() -> None:
    log: list[str] = []
    model, group = make_model(), LoggedGroup(log)
    model[0].weight.register_hook(lambda gradient: log.append("first layer"))  # type: ignore[index]
    sums = GradientSums(model.parameters(), exact=False, bucket_bytes=1)
    sums.begin_step(12, FIXED)
    for slot, last in ((slice(0, 6), None), (slice(6, 12), group)):
        sums.begin_slot(6, last)
        loss_of(model, slot).backward()
        sums.end_slot()
        log.append("end of slot")
    assert log[:2] == ["first layer", "end of slot"], "a slot that is not the last reduces nothing"
    assert log.index("reduce 4") < log.index("first layer", 2), log
    sums.reduce(group)
    assert [line for line in log if line.startswith("reduce")] == ["reduce 1", "reduce 4", "reduce 4", "reduce 12"]


class EndedGroup(SoloGroup):
    """A group whose generation is over."""

    def all_reduce_async(self, tensor: Tensor) -> Work:
        raise GenerationEnded("a worker is lost")


def test_a_loss_does_not_show_within_the_backward_pass() -> None:
    model = make_model()
    sums, group = GradientSums(model.parameters(), exact=False, bucket_bytes=1), EndedGroup()
    sums.begin_step(12, FIXED)
    sums.begin_slot(12, group)
    loss_of(model, slice(0, 12)).backward()
    sums.end_slot()
    with pytest.raises(GenerationEnded):
        sums.reduce(group)
    sums.forget_reduction(is_aborted=True)
    sums.reduce(SoloGroup())
    sums.publish()
    for parameter, whole in zip(model.parameters(), oracle(slice(0, 12))):
        torch.testing.assert_close(parameter.grad, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("bytes_", [1, 10**6])
def test_a_slot_that_was_thought_to_be_the_last_and_others_after_a_loss(bytes_: int) -> None:
    """Of four parameters some have gradients of one slot alone, either one's, or of none."""
    parameters = [nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(4)]
    sums, slots = GradientSums(parameters, exact=False, bucket_bytes=bytes_), ((5, (0, 1)), (2, (1, 2)), (1, (0, 1)))
    wanted = [torch.zeros(3, dtype=torch.float64) for _ in parameters]
    for _ in range(2):
        sums.begin_step(8, FIXED)
        for weight, used in slots:
            sums.begin_slot(weight, EndedGroup())
            sum((number + weight) * parameters[number].sum() for number in used).backward()  # type: ignore[union-attr]
            sums.end_slot()
            sums.forget_reduction(is_aborted=True)
        sums.reduce(SoloGroup())
        sums.publish()
    for weight, used in slots:
        for number in used:
            wanted[number] += weight * (number + weight) / 8
    for parameter, sum_ in zip(parameters, wanted):
        torch.testing.assert_close(parameter.grad, sum_, rtol=0, atol=1e-12)


def test_the_gradients_of_an_only_slot_are_copied_once() -> None:
    model = make_model()
    sums = GradientSums(model.parameters(), exact=False, bucket_bytes=10**6)
    for _ in range(2):
        sums.begin_step(12, FIXED)
        sums.begin_slot(12, SoloGroup())
        loss_of(model, slice(0, 12)).backward()
        sums.end_slot()
        sums.reduce(SoloGroup())
        sums.publish()
    (bucket,) = sums._buckets
    assert "own" not in vars(bucket), "there are no sums beside autograd's gradients and the reduced ones"


def test_a_reduction_that_was_aborted_is_made_again_of_the_same_sums() -> None:
    model = make_model()
    sums, group = GradientSums(model.parameters(), exact=False), SoloGroup()
    sums.begin_step(12, FIXED)
    sums.begin_slot(12, group)
    loss_of(model, slice(0, 12)).backward()
    sums.end_slot()
    for broken in sums.gradients():  # another worker was lost: what is there is half a sum
        broken.fill_(float("nan"))
    sums.forget_reduction(is_aborted=True)
    sums.reduce(group)
    sums.publish()
    for parameter, whole in zip(model.parameters(), oracle(slice(0, 12))):
        torch.testing.assert_close(parameter.grad, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("exact", [False, True])
def test_what_an_aborted_reduction_writes_late_changes_nothing(exact: bool) -> None:
    model = make_model()
    sums = GradientSums(model.parameters(), exact=exact)
    sums.begin_step(12, FIXED)
    sums.begin_slot(12, None)
    loss_of(model, slice(0, 12)).backward()
    sums.end_slot()
    sums.reduce(SoloGroup())
    (late,) = [bucket.in_flight[1] for bucket in sums._buckets if bucket.in_flight]
    sums.forget_reduction(is_aborted=True)
    sums.reduce(SoloGroup())
    late.fill_(7 if exact else torch.nan)
    sums.publish()
    for parameter, whole in zip(model.parameters(), oracle(slice(0, 12))):
        torch.testing.assert_close(parameter.grad, whole, rtol=0, atol=1e-12)


def test_ghosts_and_unused_parameters_count_as_zero() -> None:
    model, unused = make_model(), nn.Parameter(torch.ones(3, dtype=torch.float64))
    sums, group = GradientSums([*model.parameters(), unused], exact=False), SoloGroup()
    for weight, expected in ((12.0, oracle(slice(0, 12))), (0.0, [torch.zeros_like(p) for p in model.parameters()])):
        sums.begin_step(12, FIXED)
        sums.begin_slot(weight, group)
        loss_of(model, slice(0, 12)).backward()
        sums.end_slot()
        sums.reduce(group)
        sums.publish()
        assert unused.grad is not None and not unused.grad.any()
        for parameter, whole in zip(model.parameters(), expected):
            torch.testing.assert_close(parameter.grad, whole, rtol=0, atol=1e-12)


def test_gradients_that_exact_sums_can_not_hold_are_refused() -> None:
    model = make_model()
    sums = GradientSums(model.parameters(), exact=True)
    sums.begin_step(12, FIXED)
    sums.begin_slot(1.0, None)
    (model(X).sum() * float("inf")).backward()
    with pytest.raises(UserError, match="infinite or not a number"):
        sums.end_slot()


@pytest.mark.parametrize("exact", [False, True])
def test_sparse_gradients_are_refused(exact: bool) -> None:
    table = nn.Embedding(8, 3, sparse=True)
    sums = GradientSums(table.parameters(), exact=exact)
    sums.begin_step(2, FIXED)
    sums.begin_slot(2, SoloGroup())
    with pytest.raises(UserError, match="without sparse=True"):
        table(torch.tensor([1, 5])).sum().backward()


def test_half_precision_is_summed_in_float32() -> None:
    parameter = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    sums, group = GradientSums([parameter], exact=False), SoloGroup()
    sums.begin_step(1, FIXED)
    for value in (256.0, 1.0):  # 257 needs nine bits
        sums.begin_slot(1.0, None)
        (parameter * value).sum().backward()
        sums.end_slot()
    sums.reduce(group)
    assert sums.gradients()[0].tolist() == [257.0, 257.0]
    sums.publish()
    assert parameter.grad is not None and parameter.grad.dtype == torch.bfloat16


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(UserError, match="no parameter"):
        GradientSums([], exact=False)
