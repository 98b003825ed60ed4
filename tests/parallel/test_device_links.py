"""Messages from device to device: announced and verified on the host, kept alive until they are sent."""

import random
from dataclasses import replace

import pytest
import torch

from parallel3d.config.schema import FaultConfig
from parallel3d.errors import ProtocolError
from parallel3d.inprocess import harness
from parallel3d.inprocess.world import ThreadWorld, run_threads
from parallel3d.parallel.device_links import DeviceLinks
from parallel3d.parallel.grid import Grid
from parallel3d.parallel.groups import neighbour_pairs
from parallel3d.parallel.p2p_messages import Kind
from parallel3d.pipeline.chunk_layout import ChunkLayout
from tests.support.kill_layouts import config_of
from tests.support.socket_links import message
from tests.support.thread_kills import assert_same_run, run, undisturbed
from tests.support.thread_pairs import ThreadPairs

CPU = torch.device("cpu")


def make_links(world, pairs, rank, neighbours):
    own = {pair: pairs.make_pair(rank)(str(pair), pair) for pair in neighbours if rank in pair}
    return DeviceLinks(world.links(rank), own, rank=rank, device=CPU)


def exchange(sender, receiver, neighbours=((0, 1), (1, 0))):
    """Runs `sender(links)` and `receiver(links)` on two ranks; returns the second's result and the pairs."""
    world = ThreadWorld(2)
    pairs = ThreadPairs(world)

    def body(rank, world):
        return (sender, receiver)[rank](make_links(world, pairs, rank, neighbours))

    return run_threads(2, body, world=world)[1], pairs


def count_sends(monkeypatch):
    sends = []
    original = ThreadPairs.make_pair

    def make_pair(self, rank):
        make = original(self, rank)

        def counting(name, pair):
            made = make(name, pair)
            send = made.send_async
            made.send_async = lambda tensor: sends.append(pair) or send(tensor)
            return made

        return counting

    monkeypatch.setattr(ThreadPairs, "make_pair", make_pair)
    return sends


def test_messages_between_stages_go_from_device_to_device_in_order():
    sent = [message(number, kind=kind) for number, kind in enumerate([Kind.ACTIVATION, Kind.GRADIENT] * 3)]

    def send(links):
        for header, tensor in sent:
            links.send(1, header, tensor)

    received, pairs = exchange(send, lambda links: [links.receive(0, header) for header, _ in sent])
    assert all(torch.equal(got, tensor) for got, (_, tensor) in zip(received, sent))
    assert list(pairs.queues) == ["(0, 1)", "(1, 0)"]


@pytest.mark.parametrize("kind", [Kind.TARGETS, Kind.REDUCED, Kind.STATE])
def test_other_messages_go_over_the_host(kind):
    header, tensor = message(3, kind=kind)
    got, pairs = exchange(lambda links: links.send(1, header, tensor), lambda links: links.receive(0, header))
    assert torch.equal(got, tensor) and got is not tensor


def test_a_message_that_the_schedule_did_not_promise_is_an_error_before_anything_is_received():
    header, tensor = message(3)
    with pytest.raises(ProtocolError, match="expected activation of micro-batch 4.*got activation of micro-batch 3"):
        exchange(
            lambda links: links.send(1, header, tensor),
            lambda links: links.receive(0, replace(header, micro_batch=4)),
        )


def test_the_tensor_lives_until_it_is_sent():
    """The device reads it later than the host has moved on."""
    header, tensor = message(1)

    def send(links):
        links.send(1, header, tensor.clone())
        in_flight = links._in_flight[1]
        before = len(in_flight)
        links._host.receive(1, header)  # by now it has arrived
        links.send(1, header, tensor.clone())
        return before, len(in_flight)

    def receive(links):
        links.receive(0, header)
        links._host.send(0, header, tensor)
        links.receive(0, header)

    world = ThreadWorld(2)
    pairs = ThreadPairs(world)
    counts = run_threads(
        2, lambda rank, world: (send, receive)[rank](make_links(world, pairs, rank, ((0, 1),))), world=world
    )[0]
    assert counts == (1, 1)


@pytest.mark.parametrize("seed", range(8))
def test_all_ranks_can_connect_in_their_own_order(seed):
    """Each rank builds one communicator after the other, and each needs both of its ends."""
    draw = random.Random(seed)
    num_stages, tp_size = draw.randint(2, 5), draw.randint(1, 2)
    layout = draw.choice([ChunkLayout.round_robin(num_stages, draw.randint(1, 2)), ChunkLayout.v_shape(num_stages)])
    grid = Grid.of_replicas([draw.randint(1, 3) for _ in range(num_stages)], tp_size=tp_size)
    waiting = {rank: list(neighbour_pairs(grid, rank, layout.borders)) for rank in grid.ranks}
    num_pairs = sum(map(len, waiting.values())) // 2
    for _ in range(num_pairs):
        heads = {rank: pairs[0] for rank, pairs in waiting.items() if pairs}
        ready = next(pair for pair in heads.values() if heads.get(pair[0]) == heads.get(pair[1]) == pair)
        for rank in ready:
            waiting[rank].pop(0)
    assert not any(waiting.values())


@pytest.mark.parametrize(
    "faults", [(), (FaultConfig(rank=1, kind="kill", step=2, phase="forward"),)], ids=["calm", "kill"]
)
@pytest.mark.parametrize("layout", ["pp2-dp2-tp2", "interleaved-pp3", "zb-v-pp3"])
def test_a_run_is_the_same_over_pairs(layout, faults, monkeypatch):
    """After a loss the replicas of one stage are more than the other's: rerouted messages go over the host."""
    sends = count_sends(monkeypatch)
    original = harness.ThreadNetwork.transports
    all_pairs = {}

    def transports(self, record, token, former):
        pairs = all_pairs.setdefault(id(self._world), ThreadPairs(self._world))
        return replace(original(self, record, token, former), make_pair=pairs.make_pair(self._rank))

    expected = undisturbed(layout)
    monkeypatch.setattr(harness.ThreadNetwork, "transports", transports)
    done = run(config_of(layout), faults)
    assert_same_run(done, expected)
    assert sends and done.num_changes == len(faults)
