"""The interpreter on threads: split backwards, chunks, straight and damaged grids give the same gradients."""

from collections import Counter
from itertools import pairwise

import pytest
import torch

from parallel3d.config.schema import ModelConfig
from parallel3d.inprocess.world import run_threads
from parallel3d.layers.gradient_sink import GradientSink, WeightGradStore
from parallel3d.layers.init import initial_value
from parallel3d.layers.micro_batch import BatchPlan
from parallel3d.layers.parameter import parameters_of
from parallel3d.layers.placement import LayerContext
from parallel3d.models.make import make_decoder
from parallel3d.parallel.grid import Grid
from parallel3d.parallel.staged_group import HostCopy
from parallel3d.parallel.tensor_parallel import TensorParallel
from parallel3d.pipeline.check import check_plan
from parallel3d.pipeline.compute_clock import DeviceClock, HostClock
from parallel3d.pipeline.executor import Executor, LoadedMicroBatch
from parallel3d.pipeline.instructions import Op
from parallel3d.pipeline.partition import StageCosts
from parallel3d.pipeline.planner import plan_pipeline
from parallel3d.pipeline.request import PlanRequest
from parallel3d.precision.policy import POLICIES
from tests.support.damaged_grids import schedule_fields
from tests.support.lazy_accelerator import LazyAccelerator

MODEL = ModelConfig(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=4,
    initializer_range=0.2,
)
SEQ, NUM_MICRO_BATCHES = 8, 6
ADDS = {Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT}


def numbers_of(losses):
    return {micro_batch: loss.item() for micro_batch, loss in losses.items()}


def make_plan(grid, schedule, virtual_stages=1, **options):
    plan = plan_pipeline(
        PlanRequest(
            replicas=grid.replicas,
            num_micro_batches=NUM_MICRO_BATCHES,
            **schedule_fields(schedule, virtual_stages),
            costs=StageCosts.equal(grid.pp_size * virtual_stages),
            virtual_stages=virtual_stages,
            **options,
        )
    )
    check_plan(plan, plan.request.slots)
    return plan


def load(micro_batch):
    """Tokens that depend on the sequence slot alone."""
    drawn = [
        torch.randint(MODEL.vocab_size, (2, SEQ), generator=torch.Generator().manual_seed(slot))
        for slot in micro_batch.slots
    ]
    inputs, targets = torch.cat(drawn, dim=1)
    return LoadedMicroBatch(inputs.contiguous(), targets.contiguous())


def make_chunks(pp, num_stages, virtual_stages, tp, model):
    """The chunks of one stage: layers are dealt out evenly, in order, over all virtual stages."""
    num_chunks, num_layers = num_stages * virtual_stages, model.num_hidden_layers
    cuts = [number * num_layers // num_chunks for number in range(num_chunks + 1)]
    chunks = torch.nn.ModuleList(
        make_decoder(model, range(*ends), num_positions=SEQ, context=LayerContext(tp=tp, policy=POLICIES["fp64"]))
        for ends in list(pairwise(cuts))[pp::num_stages]
    )
    for p in parameters_of(chunks):
        p.data.copy_(initial_value(p.sharding, seed=7, tp=tp.shard))
    return chunks


class StagedLinks:
    """A thread's links for the tensors of a device, as sockets are."""

    def __init__(self, links, device):
        self.links, self.device = links, device

    def send(self, destination, header, tensor):
        self.links.send(destination, header, HostCopy(tensor, aside=True, accelerator=self.device).read())

    def receive(self, source, expected):
        return self.links.receive(source, expected)


class TimedChunk(torch.nn.Module):
    """A chunk that takes a device a second forward and two backward."""

    def __init__(self, chunk, device):
        super().__init__()
        self.chunk, self.device = chunk, device

    def forward(self, *args):
        output = self.chunk(*args)
        self._take(1.0)
        output.register_hook(lambda grad: self._take(2.0))
        return output

    def _take(self, seconds):
        self.device.now_s += seconds


def run(grid, plan, batch=None, model=MODEL, devices=None):
    """Returns for each rank its result, its gradients by name, how often each parameter had one in which op, its hook
    calls. `devices` measure it as well."""
    batch = batch or BatchPlan(
        seed=1, iteration=1, num_micro_batches=NUM_MICRO_BATCHES, micro_batch_size=2, sequence_length=SEQ
    )

    def body(rank, world):
        coordinates = grid.coordinates(rank)
        tp = TensorParallel(
            group=world.make_group(rank)(f"tp{coordinates.pp}-{coordinates.dp}", grid.tp_ranks(coordinates.replica))
        )
        chunks = make_chunks(coordinates.pp, grid.pp_size, plan.request.virtual_stages, tp, model)
        counts, told, weight_grads = Counter(), [], WeightGradStore()
        for p in parameters_of(chunks):
            on_added = lambda name=p.sharding.name: counts.update([(name, told[-1])])  # noqa: E731
            p.attach(GradientSink.with_own_buffer(p, weight_grads=weight_grads, on_added=on_added))
        executor = Executor(
            chunks=list(chunks) if devices is None else [TimedChunk(chunk, devices[rank]) for chunk in chunks],
            layout=plan.request.layout,
            grid=grid,
            rank=rank,
            generation=0,
            links=world.links(rank) if devices is None else StagedLinks(world.links(rank), devices[rank]),
            tp=tp,
            hidden_size=MODEL.hidden_size,
            dtype=torch.float64,
            device=torch.device("cpu"),
            accelerator=None if devices is None else devices[rank],
            clock=HostClock() if devices is None else DeviceClock(devices[rank]),
            token=world.tokens[rank],
            weight_grads=weight_grads,
            on_instruction=lambda step: told.append(step.op),
            after_compute=lambda micro_batch, grad_pass: told.append("added"),
        )
        with torch.set_grad_enabled(batch.training):
            result = executor.run(plan.lists[coordinates.replica], batch, load)
        grads = {p.sharding.name: p.main_grad for p in parameters_of(chunks) if counts}
        return coordinates, result, grads, counts, told

    return run_threads(max(grid.ranks) + 1, body)


def total_grads(results):
    """Sums over the replicas, tensor ranks apart."""
    total = {}
    for coordinates, _, grads, _, _ in results:
        for name, grad in grads.items():
            total[name, coordinates.tp] = total.get((name, coordinates.tp), 0) + grad
    return total


@pytest.mark.parametrize("tp_size", [1, 2])
def test_zb_h1_is_bitwise_1f1b(tp_size):
    """Both backward the micro-batches in the same order, so that even the sums are the same."""
    grid = Grid.uniform(tp_size=tp_size, pp_size=3, dp_size=1)
    whole, split = (run(grid, make_plan(grid, schedule)) for schedule in ("1f1b", "zb-h1"))
    for (_, result, grads, _, _), (_, other, others, _, _) in zip(whole, split):
        assert grads and grads.keys() == others.keys()
        assert all(torch.equal(grad, others[name]) for name, grad in grads.items())
        assert (result.losses, result.backwarded) == (other.losses, other.backwarded)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_copies_between_stages_run_beside_the_computation(schedule):
    """On a device whose copies come as late as they may: bitwise the same, so nothing was read too early."""
    grid = Grid.uniform(tp_size=1, pp_size=3, dp_size=1)
    plan = make_plan(grid, schedule)
    devices = [LazyAccelerator() for _ in grid.ranks]
    for (coordinates, result, grads, _, _), (_, other, others, _, _) in zip(
        run(grid, plan), run(grid, plan, devices=devices)
    ):
        assert all(torch.equal(grad, others[name]) for name, grad in grads.items())
        assert result.losses == other.losses
        num_copies = Counter(devices[coordinates.pp].log)
        assert num_copies["to_host copies"] and num_copies["to_device copies"] and not num_copies["compute copies"]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_device_computes_for_as_long_as_its_own_clock_says_and_input_is_not_part_of_it(schedule):
    """Its computing stream waits 100 s for each input; the host waits for copies that it sends, and no longer."""
    grid = Grid.uniform(tp_size=1, pp_size=3, dp_size=1)
    plan, devices = make_plan(grid, schedule), [LazyAccelerator() for _ in grid.ranks]
    for device in devices:
        device.wait_s = 100.0
    for coordinates, result, *_ in run(grid, plan, devices=devices):
        device, times = devices[coordinates.pp], result.times()
        assert times.busy_s == 3.0 * NUM_MICRO_BATCHES
        num_inputs = device.log.count("compute waits for to_device")
        assert num_inputs and times.run_s == times.busy_s + 100.0 * num_inputs
        assert "the host waits for compute" not in device.log


@pytest.mark.each_value
@pytest.mark.parametrize("extra", [0, 2])
@pytest.mark.parametrize("routing", ["reroute", "drop"])
@pytest.mark.parametrize("split", [False, True])
def test_every_plan_of_a_damaged_grid_has_the_gradients_of_one_process(routing, split, extra):
    """Stage 1 has one replica of two; sums in fp64 differ in their order alone."""
    solo = Grid.uniform(tp_size=1, pp_size=1, dp_size=1)
    [(_, expected_result, expected, _, _)] = run(solo, make_plan(solo, "1f1b"))
    grid = Grid.of_replicas([2, 1, 2], tp_size=1)
    plan = make_plan(grid, "1f1b", routing=routing, split_backward=split, extra_in_flight=extra)
    results = run(grid, plan)
    total = total_grads(results)
    assert {name for name, _ in total} == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(total[name, 0], grad, rtol=1e-11, atol=1e-13)
    losses = {m: loss.item() for _, result, _, _, _ in results for m, loss in result.losses.items()}
    assert losses == pytest.approx(numbers_of(expected_result.losses), rel=1e-13)
    for coordinates, result, grads, counts, _ in results:
        mine = [m for m, route in enumerate(plan.routes) if route[coordinates.pp] == coordinates.dp]
        assert result.backwarded == Counter((m, 0) for m in mine) == result.forwarded
        ops = {name: op for name, op in counts}
        assert set(counts.values()) <= {len(mine)} and set(grads) <= set(ops) and len(ops) == len(counts)
        for name, op in ops.items():
            is_linear = any(part in name for part in ("qkv", "output", "gate_up", "down"))
            assert op is (Op.BACKWARD if not split else Op.BACKWARD_WEIGHT if is_linear else Op.BACKWARD_INPUT)


DEEP = MODEL.model_copy(update={"num_hidden_layers": 6})


@pytest.mark.each_value
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    ("counts", "chunks", "tp_size"),
    [([1, 1], 3, 1), ([1, 1, 1], 2, 2), ([2, 2, 2], 2, 1), ([2, 1], 2, 1), ([2, 1, 2], 2, 1)],
)
def test_chunks_have_the_gradients_of_one_process(counts, chunks, tp_size, split, slots):
    """Straight and damaged: a micro-batch comes by every replica of its route once for each chunk."""
    solo = Grid.uniform(tp_size=tp_size, pp_size=1, dp_size=1)
    expected = run(solo, make_plan(solo, "1f1b"), model=DEEP)
    grid = Grid.of_replicas(counts, tp_size=tp_size)
    plan = make_plan(grid, "interleaved", chunks, split_backward=split, slots=slots)
    results = run(grid, plan, model=DEEP)
    total, whole = total_grads(results), total_grads(expected)
    assert total.keys() == whole.keys()
    for key, grad in whole.items():
        torch.testing.assert_close(total[key], grad, rtol=1e-11, atol=1e-13)
    losses = {m: loss.item() for _, result, _, _, _ in results for m, loss in result.losses.items()}
    assert losses == pytest.approx(numbers_of(expected[0][1].losses), rel=1e-13)
    for coordinates, result, _, _, _ in results:
        mine = [m for m, route in enumerate(plan.routes) if route[coordinates.pp] == coordinates.dp]
        assert result.backwarded == result.forwarded == Counter((m, c) for m in mine for c in range(chunks))
        assert 0 < result.times().busy_s <= result.times().run_s


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_who_watches_is_told_before_each_instruction_and_after_each_that_adds(schedule):
    grid = Grid.uniform(tp_size=1, pp_size=3, dp_size=1)
    plan = make_plan(grid, schedule)
    for coordinates, _, _, _, told in run(grid, plan):
        adds = ADDS | (
            {Op.FORWARD} if coordinates.pp == 2 else set()
        )  # the head's gradient is made in the forward pass
        expected = []
        for step in plan.lists[coordinates.replica]:
            expected += [step.op, "added"] if step.op in adds else [step.op]
        assert told == expected


@pytest.mark.parametrize("chunks", [1, 2])
def test_an_evaluation_adds_nothing(chunks):
    grid = Grid.uniform(tp_size=1, pp_size=3, dp_size=1)
    batch = BatchPlan(
        seed=1,
        iteration=1,
        num_micro_batches=NUM_MICRO_BATCHES,
        micro_batch_size=2,
        sequence_length=SEQ,
        training=False,
    )
    results = run(grid, make_plan(grid, "forward", chunks), batch, model=DEEP)
    assert all("added" not in told and not grads and not counts for _, _, grads, counts, told in results)
    assert len(results[2][1].losses) == NUM_MICRO_BATCHES
