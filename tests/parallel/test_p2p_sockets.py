"""Links over real TCP connections on the loopback device, several ranks in one process."""

import dataclasses
import socket
import threading
import time

import pytest
import torch

from parallel3d.accelerator import MetaAccelerator
from parallel3d.errors import GenerationEnded, ProtocolError
from parallel3d.parallel import p2p_sockets as module
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.p2p_messages import Kind
from parallel3d.parallel.p2p_sockets import SocketLinks, open_listener
from tests.support.run_secrets import SECRET, enter
from tests.support.socket_links import MIB, in_thread, message, until


def test_messages_come_in_the_order_of_the_sends(connect):
    one, two = connect(2)
    sent = [message(number) for number in range(20)]
    thread, result = in_thread(lambda: [one.send(1, *each) for each in sent])
    for header, tensor in sent:
        assert torch.equal(two.receive(0, header), tensor)
    thread.join(timeout=300)
    assert result == [None]


def test_three_ranks_in_a_ring_and_back(connect):
    """Every ordered pair has its own slots, which no other pair uses."""
    links = connect(3)
    for step in range(5):
        for rank in range(3):
            for to in ((rank + 1) % 3, (rank - 1) % 3):
                links[rank].send(to, *message(100 * step + 10 * rank + to))
        for rank in range(3):
            for source in ((rank + 1) % 3, (rank - 1) % 3):
                header, tensor = message(100 * step + 10 * source + rank)
                assert torch.equal(links[rank].receive(source, header), tensor)


TENSORS = {
    "fp32": torch.randn(5, 7, generator=torch.Generator().manual_seed(1)),
    "bf16": torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(2)).bfloat16(),
    "fp64": torch.tensor([float("nan"), -0.0, float("inf")], dtype=torch.float64),
    "int64": torch.tensor([2**62 + 1, -5]),
    "zero size": torch.empty(0, 16),
    "scalar": torch.tensor(2.5),
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "requires grad": torch.arange(4.0).requires_grad_(),
    "32 MiB": torch.arange(8 * MIB, dtype=torch.float32),
}


@pytest.mark.parametrize("name", TENSORS)
def test_what_arrives_is_bitwise_what_was_sent(connect, name):
    one, two = connect(2)
    header, tensor = message(tensor=TENSORS[name])
    one.send(1, header, tensor)
    got = two.receive(0, header)
    assert got.shape == tensor.shape and got.dtype == tensor.dtype and not got.requires_grad
    assert module._as_bytes(got).tobytes() == module._as_bytes(tensor.contiguous()).tobytes()


@pytest.mark.parametrize(
    "change",
    [{"micro_batch": 4}, {"iteration": 8}, {"generation": 1}, {"kind": Kind.GRADIENT}, {"shape": (3, 2)}],
    ids=str,
)
def test_a_message_that_the_schedule_did_not_promise(connect, change):
    one, two = connect(2)
    header, tensor = message(3)
    one.send(1, header, tensor)
    with pytest.raises(ProtocolError, match="from rank 0: expected .*; got activation of micro-batch 3, iteration 7"):
        two.receive(0, dataclasses.replace(header, **change))


def test_a_sender_waits_while_its_slots_are_full_and_goes_on_when_one_is_read(connect):
    """48 MiB a message: more than the system buffers. On their way at most: both sides' slots and one in between."""
    num_messages, slots = 8, 1
    one, two = connect(2, slots=slots)
    big = torch.zeros(12 * MIB)
    sent = []

    def send_all():
        for number in range(num_messages):
            one.send(1, *message(number, big))
            sent.append(number)

    thread, result = in_thread(send_all)
    until(lambda: len(sent) >= 2 * slots + 1)
    time.sleep(0.3)
    stuck_at = len(sent)
    assert stuck_at <= 2 * slots + 1 and thread.is_alive()
    two.receive(0, message(0, big)[0])
    until(lambda: len(sent) > stuck_at)
    time.sleep(0.1)
    assert len(sent) == stuck_at + 1
    for number in range(1, num_messages):
        two.receive(0, message(number, big)[0])
    thread.join(timeout=300)
    assert result == [None] and len(sent) == num_messages


def test_unbounded_sends_wait_for_nobody_and_arrive_in_order(connect):
    """Ranges of state are sent before they are read: two ranks send each other more than all slots hold."""
    links = connect(2, slots=1)
    big = [message(number, torch.full((MIB,), float(number))) for number in range(6)]
    for rank in (0, 1):
        for header, tensor in big:
            links[rank].send(1 - rank, header, tensor, bounded=False)
    for rank in (0, 1):
        for header, tensor in big:
            assert torch.equal(links[rank].receive(1 - rank, header), tensor)


def test_unbounded_messages_fill_the_slots_of_bounded_ones(connect):
    one, two = connect(2, slots=1)
    big = torch.zeros(12 * MIB)
    for number in range(5):
        one.send(1, *message(number, big), bounded=False)
    thread, result = in_thread(lambda: one.send(1, *message(5, big)))
    time.sleep(0.2)
    assert thread.is_alive()
    for number in range(6):
        two.receive(0, message(number, big)[0])
    thread.join(timeout=300)
    assert result == [None]


def test_sending_does_not_wait_for_the_receiver_while_there_are_slots(connect):
    one, _ = connect(2, slots=3)
    for number in range(3):
        one.send(1, *message(number, torch.zeros(4 * MIB)))


def test_a_message_of_another_generation_is_ignored(connect):
    """The address is the same, the sender belongs to the generation before."""
    one, two = connect(2, generations=(4, 5), timeout_s=0.4)
    header, tensor = message(generation=4)
    one.send(1, header, tensor)
    with pytest.raises(GenerationEnded, match=r"rank 1 waited 0 s for activation .* with rank 0"):
        two.receive(0, header)


def test_a_late_connection_of_the_previous_generation_is_ignored(connect):
    """A peer that does not know of the change yet connects to the new address; then the same rank, renewed."""
    one, two = connect(2, generations=(5, 5))
    late, tensor = message(generation=4)
    with enter(connect.addresses[1]) as peer:
        peer.sendall(module._HELLO.pack(4, 0, False) + late.pack() + bytes(late.num_bytes))
        header, tensor = message(3, generation=5)
        one.send(1, header, tensor)
        assert torch.equal(two.receive(0, header), tensor)


def test_a_stranger_harms_nobody(connect):
    one, two = connect(2)
    for words in (b"GET / HTTP/1.1\r\nHost: node0\r\n\r\n", b""):
        with socket.create_connection(connect.addresses[1]) as stranger:
            stranger.sendall(words)
    header, tensor = message()
    one.send(1, header, tensor)
    assert torch.equal(two.receive(0, header), tensor)


def test_rubbish_from_a_peer_is_told(connect):
    _, two = connect(2)
    with enter(connect.addresses[1]) as peer:
        peer.sendall(module._HELLO.pack(0, 0, False) + b"x" * 200)
        with pytest.raises(GenerationEnded, match="link with rank 0 broke: a message begins with b'xxxx'"):
            two.receive(0, message()[0])


def test_a_message_that_no_memory_can_hold_breaks_the_link_alone(connect):
    _, two = connect(2)
    header, _ = message()
    huge = dataclasses.replace(header, shape=(2**40, 2**40, 2**40))
    with enter(connect.addresses[1]) as peer:
        peer.sendall(module._HELLO.pack(0, 0, False) + huge.pack())
        with pytest.raises(GenerationEnded, match="link with rank 0 broke: "):
            two.receive(0, header)


def test_a_peer_that_closes_is_named(connect):
    one, two, three = connect(3)
    for to in (1, 2):
        one.send(to, *message())
    assert two.receive(0, message()[0]).sum() == 0
    one.close()
    with pytest.raises(GenerationEnded, match="rank 1 waited for .* micro-batch 1.*link with rank 0 broke: closed"):
        two.receive(0, message(1)[0])
    two.send(2, *message(5))  # other links go on
    assert three.receive(1, message(5)[0]).sum() == 30
    assert three.receive(0, message()[0]).sum() == 0  # what had come before is still there


def test_the_coordinators_reason_is_better_than_a_broken_link(connect, monkeypatch):
    monkeypatch.setattr(module, "ABORT_GRACE_S", 60.0)
    one, two = connect(2)
    one.send(1, *message())
    two.receive(0, message()[0])
    one.close()
    threading.Timer(0.2, connect.tokens[1].abort, ["rank 0 was killed"]).start()
    started = time.monotonic()
    with pytest.raises(GenerationEnded, match="^rank 0 was killed$"):
        two.receive(0, message(1)[0])
    assert time.monotonic() - started < 30


def test_a_receiver_that_is_gone_breaks_the_senders_link(connect):
    one, two = connect(2, slots=1)
    one.send(1, *message())
    two.receive(0, message()[0])
    two.close()
    with pytest.raises(GenerationEnded, match="link with rank 1 broke"):
        for number in range(10):
            one.send(1, *message(number, torch.zeros(4 * MIB)))


def test_nobody_answers_at_all(connect):
    one, two = connect(2)
    two.close()
    with pytest.raises(GenerationEnded, match="link with rank 1 broke: .*refused"):
        for number in range(10):
            one.send(1, *message(number))


def test_close_sends_what_is_in_the_slots(connect):
    one, two = connect(2, slots=3)
    one.send(1, *message(9))
    two.receive(0, message(9)[0])  # connected: what follows is under way when the sockets are about to be closed
    sent = [message(number, torch.full((8 * MIB,), float(number))) for number in range(3)]
    for each in sent:
        one.send(1, *each)
    one.close()
    for header, tensor in sent:
        assert torch.equal(two.receive(0, header), tensor)


def test_close_with_unread_messages_leaves_no_reader_behind(connect):
    """The inbox is full and another message has come: its reader must not wait for a receiver that has left."""
    one, two = connect(2, slots=1)
    for number in range(3):
        one.send(1, *message(number))
    until(lambda: len(two._inbox.get(0, ())) == 1 and not one._outbox[1])
    two.close()


def test_the_address_is_asked_once_and_only_when_needed(connect):
    asked = []
    listeners = [open_listener("127.0.0.1") for _ in range(2)]

    def address_of(rank):
        asked.append(rank)
        return listeners[rank].getsockname()

    make = dict(secret=SECRET, generation=0, address_of=address_of, slots=3, timeout_s=5.0)
    one, two = (SocketLinks(rank=r, listener=listeners[r], token=AbortToken(), **make) for r in (0, 1))
    try:
        assert asked == []
        for number in range(3):
            one.send(1, *message(number))
            two.receive(0, message(number)[0])
        assert asked == [1]
    finally:
        one.close()
        two.close()


class TakenAccelerator(MetaAccelerator):
    """A device that writes down who takes it."""

    def __init__(self):
        super().__init__()
        self.taken = []

    def use(self):
        self.taken.append(threading.current_thread().name)


def test_each_thread_of_the_links_takes_the_device_first():
    devices = [TakenAccelerator(), TakenAccelerator()]
    listeners = [open_listener("127.0.0.1") for _ in range(2)]
    addresses = [listener.getsockname() for listener in listeners]
    links = [
        SocketLinks(
            rank=rank,
            secret=SECRET,
            generation=0,
            listener=listeners[rank],
            address_of=addresses.__getitem__,
            slots=1,
            token=AbortToken(),
            timeout_s=10.0,
            accelerator=devices[rank],
        )
        for rank in range(2)
    ]
    header, tensor = message(tensor=torch.zeros(2))
    links[0].send(1, header, tensor)
    links[1].receive(0, header)
    for each in links:
        each.close()
    assert set(devices[0].taken) == {"links-_accept", "links-_write_to"}
    assert set(devices[1].taken) == {"links-_accept", "links-_read_from"}


def test_an_idle_link_ends_when_the_other_host_no_longer_answers(connect):
    one, two = connect(2)
    header, tensor = message(1)
    one.send(1, header, tensor)
    two.receive(0, header)
    for links in (one, two):
        (link,) = [each for each in links._sockets if each is not links._listener]
        assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == module.LINK_IDLE_S
