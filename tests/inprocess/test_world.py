"""Ranks as threads: collectives, messages, deadlock reports, injected deaths."""

import threading
import time

import pytest
import torch

from parallel3d.errors import GenerationEnded, ProtocolError
from parallel3d.inprocess.scheduler import DeadlockError, RankDied
from parallel3d.inprocess.world import ThreadWorld, run_threads
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.p2p_messages import Header, Kind


def header(micro_batch=0, **fields):
    return Header(
        **{
            "generation": 0,
            "iteration": 1,
            "kind": Kind.ACTIVATION,
            "micro_batch": micro_batch,
            "shape": (2,),
            "dtype": torch.float32,
            **fields,
        }
    )


def numbers(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def group_of_all(rank, world, name="world"):
    return world.make_group(rank)(name, tuple(range(world.num_ranks)))


def test_collectives():
    def body(rank, world):
        group = group_of_all(rank, world)
        total = group.all_reduce(torch.tensor([1.0, 10.0]) * (rank + 1))
        top = group.all_reduce_max(torch.tensor([float(rank), -float(rank)]))
        part = group.reduce_scatter(torch.empty(2), torch.arange(6.0) + rank)
        whole = group.all_gather(torch.empty(3, 1), torch.tensor([[float(rank)]]))
        return total.tolist(), top.tolist(), part.tolist(), whole.flatten().tolist()

    for rank, result in enumerate(run_threads(3, body)):
        part = [3.0 * (2 * rank) + 3, 3.0 * (2 * rank + 1) + 3]
        assert result == ([6.0, 60.0], [2.0, 0.0], part, [0.0, 1.0, 2.0])


def test_groups_of_some_ranks_run_side_by_side_and_a_group_of_one_is_solo():
    def body(rank, world):
        make = world.make_group(rank)
        pair = make(f"pair{rank // 2}", (0, 1) if rank < 2 else (2, 3))
        assert (pair.rank, pair.size) == (rank % 2, 2)
        return pair.all_reduce(torch.tensor(float(rank))).item(), make("me", (rank,)).all_reduce(torch.ones(1)).item()

    assert run_threads(4, body) == [(1.0, 1.0), (1.0, 1.0), (5.0, 1.0), (5.0, 1.0)]


def test_sums_do_not_depend_on_who_comes_first():
    """fp32 sums in another order differ: they run in rank order whatever the timing."""
    in_rank_order = numbers(0, 4096)
    for rank in (1, 2, 3):
        in_rank_order = in_rank_order + numbers(rank, 4096)
    assert not torch.equal(numbers(3, 4096) + numbers(2, 4096) + numbers(1, 4096) + numbers(0, 4096), in_rank_order)
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):

        def body(rank, world, order=order):
            time.sleep(0.01 * order.index(rank))
            return group_of_all(rank, world).all_reduce(numbers(rank, 4096))

        assert all(torch.equal(total, in_rank_order) for total in run_threads(4, body))


def test_async_calls_take_what_was_there_and_may_be_waited_for_in_any_order():
    def body(rank, world):
        group = group_of_all(rank, world)
        first, second = torch.ones(2) * rank, torch.ones(2) * 10 * rank
        works = [group.all_reduce_async(first), group.all_reduce_async(second)]
        before = first.clone()
        works[1].wait()
        assert torch.equal(first, before)  # not this one's result
        works[0].wait()
        works[0].wait()
        return first.tolist(), second.tolist()

    assert run_threads(3, body) == [([3.0, 3.0], [30.0, 30.0])] * 3


def test_a_rank_may_run_ahead_of_its_peers_by_several_calls():
    def body(rank, world):
        group = group_of_all(rank, world)
        time.sleep(0.02 * rank)
        totals = [torch.tensor(float(rank + step)) for step in range(4)]
        for work in [group.all_reduce_async(total) for total in totals]:
            work.wait()
        return [total.item() for total in totals]

    world = ThreadWorld(2)
    assert run_threads(2, body, world=world) == [[1.0, 3.0, 5.0, 7.0]] * 2
    assert not world._collectives  # results that all ranks have read are dropped


def test_messages_keep_their_order_and_their_content():
    def body(rank, world):
        links = world.links(rank)
        if rank == 0:
            for number in range(6):
                tensor = torch.full((2,), float(number))
                links.send(1, header(number), tensor)
                tensor.zero_()  # the receiver's is its own
            return None
        return [links.receive(0, header(number)).tolist() for number in range(6)]

    assert run_threads(2, body)[1] == [[float(n)] * 2 for n in range(6)]


def test_a_message_that_was_not_promised():
    def body(rank, world):
        if rank == 0:
            world.links(0).send(1, header(3), torch.zeros(2))
        else:
            world.links(1).receive(0, header(4))

    with pytest.raises(ProtocolError, match="from rank 0: expected .*micro-batch 4.*got .*micro-batch 3"):
        run_threads(2, body)


def assert_deadlock(num_ranks, body, *phrases, world=None):
    started = time.monotonic()
    with pytest.raises(DeadlockError) as caught:
        run_threads(num_ranks, body, world=world)
    assert time.monotonic() - started < 30
    lines = str(caught.value).splitlines()
    assert lines[0] == "deadlock:" and len(lines) == 1 + len(phrases)
    for line, words in zip(lines[1:], phrases):
        assert all(word in line for word in words), line


def test_two_ranks_that_receive_from_each_other():
    def body(rank, world):
        world.doing(rank, f"forward {rank}")
        world.links(rank).receive(1 - rank, header(rank))

    assert_deadlock(
        2,
        body,
        ("rank 0 [forward 0] waits for rank 1 to send activation of micro-batch 0",),
        ("rank 1 [forward 1] waits for rank 0 to send activation of micro-batch 1",),
    )


def test_one_slot_each_way_is_not_enough_for_two_sends():
    def body(rank, world):
        for number in range(2):
            world.links(rank).send(1 - rank, header(number), torch.zeros(2))
        for number in range(2):
            world.links(rank).receive(1 - rank, header(number))

    free_slot = "waits for a free slot to rank {} to send activation of micro-batch 1"
    assert_deadlock(
        2,
        body,
        ("rank 0", free_slot.format(1)),
        ("rank 1", free_slot.format(0)),
        world=ThreadWorld(2, slots=1),
    )
    run_threads(2, body, world=ThreadWorld(2, slots=2))


def test_a_collective_that_one_member_does_not_make():
    def body(rank, world):
        group = group_of_all(rank, world, "tp/stage0")
        if rank == 1:
            world.links(1).receive(0, header())
        group.all_reduce(torch.zeros(1))

    assert_deadlock(
        3,
        body,
        ("rank 0", "for all-reduce 1 of tp/stage0, not there: ranks [1]"),
        ("rank 1", "for rank 0 to send"),
        ("rank 2", "not there: ranks [1]"),
    )


def test_a_peer_that_has_left_is_waited_for_in_vain():
    def body(rank, world):
        if rank == 1:
            time.sleep(0.05)
            return
        world.links(0).receive(1, header())

    assert_deadlock(2, body, ("rank 0", "for rank 1 to send"))


def test_collectives_that_do_not_match():
    def body(rank, world):
        group = group_of_all(rank, world)
        if rank == 0:
            group.all_reduce(torch.zeros(2))
        else:
            time.sleep(0.02)
            group.all_gather(torch.zeros(4), torch.zeros(2))

    with pytest.raises(AssertionError, match="world call 1: all-gather meets all-reduce"):
        run_threads(2, body)


def test_a_slow_rank_is_no_deadlock():
    def body(rank, world):
        if rank == 1:
            time.sleep(0.2)
            world.links(1).send(0, header(), torch.ones(2))
            return None
        return world.links(0).receive(1, header()).tolist()

    assert run_threads(2, body)[0] == [1.0, 1.0]


@pytest.mark.parametrize("call", [1, 2, 5])
def test_an_injected_death_happens_at_its_call_and_ends_the_generation_of_all(call):
    world = ThreadWorld(3)
    world.die_at(1, call)
    done, ended = [0, 0, 0], []

    def body(rank, world):
        group = group_of_all(rank, world)
        try:
            for _ in range(8):
                group.all_reduce(torch.ones(1))
                done[rank] += 1
        except GenerationEnded as error:
            ended.append((rank, str(error)))

    with pytest.raises(RankDied, match=f"rank 1 dies at its call {call}"):
        run_threads(3, body, world=world)
    assert done[1] == call - 1 and {done[0], done[2]} <= {call - 1}
    assert sorted(ended) == [(rank, f"rank 1: rank 1 dies at its call {call}") for rank in (0, 2)]


def test_messages_count_as_calls_too():
    world = ThreadWorld(2)
    world.die_at(0, 3)
    sent = []

    def body(rank, world):
        for number in range(5):
            if rank == 0:
                world.links(0).send(1, header(number), torch.zeros(2))
                sent.append(number)
            else:
                world.links(1).receive(0, header(number))

    with pytest.raises(RankDied):
        run_threads(2, body, world=world)
    assert sent == [0, 1]


def test_the_first_real_error_is_raised_and_no_thread_stays():
    def body(rank, world):
        if rank == 2:
            raise ValueError("a defect")
        group_of_all(rank, world).all_reduce(torch.ones(1))

    with pytest.raises(ValueError, match="a defect"):
        run_threads(3, body)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank-")]


# --- membership generations -------------------------------------------------------------------------------------------


def test_a_world_with_a_coordinator_survives_a_death():
    """The world aborts no token, because a coordinator handles deaths. The dead rank's result is None."""
    world = ThreadWorld(3)
    world.tolerates_deaths = True

    def body(rank, world):
        if rank == 1:
            raise RankDied("rank 1 dies")
        return world.make_group(rank)("pair", (0, 2)).all_reduce(torch.ones(1)).item()

    assert run_threads(3, body, world=world) == [2.0, None, 2.0]
    assert not any(token.aborted for token in world.tokens)


def test_even_there_a_defect_is_everybodys():
    world = ThreadWorld(2)
    world.tolerates_deaths = True

    def body(rank, world):
        if rank == 1:
            raise ValueError("a defect")
        group_of_all(rank, world).all_reduce(torch.ones(1))

    with pytest.raises(ValueError, match="a defect"):
        run_threads(2, body, world=world)


def test_a_rank_that_has_died_is_no_longer_waited_for():
    """Without it no rank can go on: a hang after a death is a deadlock, reported at once."""
    world = ThreadWorld(2)
    world.tolerates_deaths = True

    def body(rank, world):
        if rank == 1:
            raise RankDied("rank 1 dies")
        group_of_all(rank, world).all_reduce(torch.ones(1))

    assert_deadlock(2, body, ("rank 0", "not there: ranks [1]"), world=world)


def test_each_generation_has_its_own_token():
    def body(rank, world):
        if rank == 1:
            time.sleep(0.1)
            first.abort("generation 0 is over")
            return None
        with pytest.raises(GenerationEnded, match="generation 0 is over"):
            group_of_all(rank, world).all_reduce(torch.ones(1))
        world.begin_generation(0, AbortToken())
        return world.make_group(0)("alone", (0,)).all_reduce(torch.ones(1)).item()

    world, first = ThreadWorld(2), AbortToken()
    world.begin_generation(0, first)
    assert run_threads(2, body, world=world)[0] == 1.0


def test_messages_of_one_generation_never_meet_those_of_another():
    """Messages of an aborted generation stay in their slots."""

    def body(rank, world):
        if rank == 0:
            world.links(0, 0).send(1, header(0), torch.zeros(2))
            world.links(0, 1).send(1, header(0, generation=1), torch.ones(2))
            return None
        return world.links(1, 1).receive(0, header(0, generation=1)).tolist()

    assert run_threads(2, body)[1] == [1.0, 1.0]


def test_unbounded_sends_take_no_notice_of_slots():
    def body(rank, world):
        links = world.links(rank)
        for number in range(4):
            links.send(1 - rank, header(number), torch.full((2,), float(number)), bounded=False)
        return [links.receive(1 - rank, header(number)).tolist() for number in range(4)]

    assert run_threads(2, body, world=ThreadWorld(2, slots=1)) == [[[float(n)] * 2 for n in range(4)]] * 2


def test_a_wait_may_have_a_token_of_its_own():
    """Who waits for the coordinator goes on waiting when its generation is over."""
    world = ThreadWorld(2)
    done = []

    def body(rank, world):
        if rank == 0:
            world.tokens[0].abort("the generation is over")
            world.wait(0, lambda: bool(done), lambda: "for the coordinator", token=AbortToken())
            return "heard"
        time.sleep(0.05)
        world.run_locked(lambda: done.append(1))

    assert run_threads(2, body, world=world)[0] == "heard"
