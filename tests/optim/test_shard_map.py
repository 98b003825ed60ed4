"""Which ranks hold which range, and how ranges travel."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.optim.bucket_plan import BucketKey
from parallel3d.optim.shard_map import Move, ShardMap, plan_moves, plan_shard_map, plan_shard_maps
from parallel3d.parallel.grid import Grid


def shard_map_of(num_replicas: int, *, zero_stage: int = 1, zero_backups: int = 1, hosts: str = "") -> ShardMap:
    """The shard map of one stage; `hosts` has one letter for each rank."""
    grid = Grid.uniform(tp_size=1, pp_size=1, dp_size=num_replicas)
    table = dict(enumerate(hosts))
    return plan_shard_map(grid, 0, 0, zero_stage=zero_stage, zero_backups=zero_backups, hosts=table)


# --- shard maps -------------------------------------------------------------------------------------------------------


def test_the_next_replica_has_the_backup():
    assert shard_map_of(4).holders == ((0, 1), (1, 2), (2, 3), (3, 0))


@pytest.mark.parametrize(
    ("settings", "holders"),
    [
        ({"zero_backups": 0}, ((0,), (1,), (2,))),
        ({"zero_stage": 0}, ((0, 1, 2),)),
        ({"zero_stage": 0, "zero_backups": 0}, ((0, 1, 2),)),
    ],
)
def test_without_backups_and_without_ranges(settings: dict[str, int], holders: tuple[tuple[int, ...], ...]):
    assert shard_map_of(3, **settings).holders == holders


def test_a_lone_replica_has_no_backup():
    shard_map = shard_map_of(1)
    assert shard_map.holders == ((0,),) and shard_map.backup_of(0) is None and shard_map.ranges_of(0) == (0,)


@pytest.mark.parametrize(
    ("hosts", "shift"), [("aabb", 2), ("abab", 1), ("aaaa", 1), ("aaabbb", 3), ("aab", 1), ("aaaabb", 2)]
)
def test_backups_stand_on_other_hosts_as_far_as_they_can(hosts: str, shift: int):
    size = len(hosts)
    assert shard_map_of(size, hosts=hosts).holders == tuple((rank, (rank + shift) % size) for rank in range(size))


def test_a_cut_is_of_one_position_in_the_stage():
    grid = Grid.uniform(tp_size=2, pp_size=2, dp_size=2).without([2])[0]
    assert plan_shard_map(grid, 0, 1, zero_stage=1, zero_backups=1, hosts={}).holders == ((1,),)
    assert plan_shard_map(grid, 1, 1, zero_stage=1, zero_backups=1, hosts={}).holders == ((5, 7), (7, 5))


def test_ranges_and_backups_of_a_rank():
    shard_map = shard_map_of(4)
    assert shard_map.num_ranges == 4
    assert shard_map.ranges_of(0) == (0, 3) and shard_map.ranges_of(2) == (2, 1)  # its own first
    assert shard_map.ranges_of(9) == ()
    assert shard_map.backup_of(3) == 0


def test_nobody_backs_up_what_all_reduce_themselves():
    assert [shard_map_of(3, zero_stage=0).backup_of(rank) for rank in range(3)] == [None, None, None]
    assert [shard_map_of(3, zero_backups=0).backup_of(rank) for rank in range(3)] == [None, None, None]


def test_lost_ranges():
    shard_map = shard_map_of(4)
    assert (
        shard_map.lost_ranges({0, 2}) == ()
        and shard_map.lost_ranges({1, 2}) == (1,)
        and shard_map.lost_ranges(range(4)) == (0, 1, 2, 3)
    )


# --- tied embeddings -------------------------------------------------------------------------------------------------


def test_the_ends_are_cut_over_both_stages():
    grid = Grid.of_replicas([3, 1, 2], tp_size=1)
    shard_maps = plan_shard_maps(grid, 0, 0, zero_stage=1, zero_backups=1, hosts={})
    assert shard_maps.embedding.holders == ((0, 1), (1, 2), (2, 0), (4, 5), (5, 4))
    assert shard_maps.stage.holders == ((0, 1), (1, 2), (2, 0))
    assert plan_shard_maps(grid, 1, 0, zero_stage=1, zero_backups=1, hosts={}).stage.holders == ((3,),)
    tied, other = (BucketKey(decay=True, tp_replicated=False, partial_grad=False, tied=tied) for tied in (True, False))
    assert shard_maps.of(tied) is shard_maps.embedding and shard_maps.of(other) is shard_maps.stage


@given(
    num_replicas=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    tp_size=st.integers(1, 2),
    settings=st.fixed_dictionaries({"zero_stage": st.integers(0, 1), "zero_backups": st.integers(0, 1)}),
    data=st.data(),
)
def test_every_range_of_the_ends_is_held_as_one_of_its_stage(
    num_replicas: list[int], tp_size: int, settings: dict[str, int], data: st.DataObject
):
    """With backups twice, unless its stage has one replica, whose loss ends the run anyway."""
    grid = Grid.of_replicas(num_replicas, tp_size=tp_size)
    hosts = {rank: str(data.draw(st.integers(0, 2))) for rank in grid.ranks}
    for tp in range(tp_size):
        shard_maps = [plan_shard_maps(grid, stage, tp, hosts=hosts, **settings) for stage in range(grid.pp_size)]
        (embedding,) = {each.embedding for each in shard_maps}  # the same on all stages
        if settings["zero_stage"] == 0:
            assert embedding.holders == (grid.embedding_ranks(tp),)
            continue
        assert tuple(owner for owner, *_ in embedding.holders) == grid.embedding_ranks(tp)  # in the group's order
        for holders in embedding.holders:
            stage = grid.coordinates(holders[0]).pp
            assert holders in shard_maps[stage].stage.holders
            assert len(set(holders)) == (2 if settings["zero_backups"] and num_replicas[stage] > 1 else 1)


# --- moves ------------------------------------------------------------------------------------------------------------


def ranges(shard_map: ShardMap, ranks: range | tuple[int, ...], size: int) -> dict[int, list[range]]:
    """The ranges of each rank, `size` elements each."""
    return {rank: [range(n * size, (n + 1) * size) for n in shard_map.ranges_of(rank)] for rank in ranks}


def test_moves_after_a_loss():
    """Four replicas lose rank 3: ranks 0 and 2, which hold its two ranges, send them to their new holders."""
    held = ranges(shard_map_of(4), (0, 1, 2), 3)
    wanted = ranges(shard_map_of(3), range(3), 4)
    moves = plan_moves(held, wanted, 12)
    assert [move for move in moves if move.source != move.target] == [
        Move(source=1, target=0, start=3, stop=4),
        Move(source=2, target=1, start=6, stop=8),
        Move(source=2, target=0, start=8, stop=9),
        Move(source=0, target=2, start=9, stop=12),
    ]


def test_what_stays_is_one_piece():
    assert plan_moves({0: [range(0, 4), range(4, 8)]}, {0: [range(0, 8)]}, 8) == (
        Move(source=0, target=0, start=0, stop=8),
    )


def test_holders_share_the_sending():
    held = {0: [range(0, 8)], 1: [range(0, 8)]}
    wanted = {2: [range(0, 4)], 3: [range(4, 8)]}
    assert [move.source for move in plan_moves(held, wanted, 8)] == [0, 1]


def test_what_nobody_holds_is_an_error():
    with pytest.raises(AssertionError, match="no live rank holds elements 4 to 8"):
        plan_moves({0: [range(0, 4)]}, {1: [range(0, 8)]}, 8)
    assert plan_moves({}, {}, 8) == ()


@given(
    num_old=st.integers(1, 6),
    num_new=st.integers(1, 6),
    backups=st.tuples(st.integers(0, 1), st.integers(0, 1)),
    num_elements=st.integers(1, 700),
    data=st.data(),
)
def test_everybody_gets_each_element_once_from_a_live_holder(
    num_old: int, num_new: int, backups: tuple[int, int], num_elements: int, data: st.DataObject
):
    old, new = (shard_map_of(n, zero_backups=b) for n, b in zip((num_old, num_new), backups))
    dead = data.draw(st.sets(st.integers(0, num_old - 1)))
    if old.lost_ranges(dead):
        return
    live = tuple(rank for rank in range(num_old) if rank not in dead)
    held = ranges(old, live, -(-num_elements // num_old))  # both padded at the end
    wanted = ranges(new, range(num_new), -(-num_elements // num_new))
    got: dict[int, list[int]] = {rank: [] for rank in wanted}
    for move in plan_moves(held, wanted, num_elements):
        assert move.start < move.stop <= num_elements
        for element in range(move.start, move.stop):
            got[move.target].append(element)
            assert any(element in mine for mine in held[move.source])
            kept = any(element in mine for mine in held.get(move.target, []))
            assert kept == (move.source == move.target)
    for rank, mine in wanted.items():
        assert sorted(got[rank]) == sorted(e for r in mine for e in r if e < num_elements)


def test_a_large_stage_is_planned_at_once():
    """64 replicas lose one; the plan is part of the recovery time."""
    held = ranges(shard_map_of(64), range(1, 64), 63 * 1000)
    wanted = ranges(shard_map_of(63), range(63), 64 * 1000)
    start = time.process_time()
    moves = plan_moves(held, wanted, 64 * 63 * 1000)
    assert time.process_time() - start < 0.25  # 0.001 s measured
    assert {move.target for move in moves} == set(range(63))


@given(hosts=st.text("abcd", min_size=2, max_size=12), tp_size=st.integers(1, 2), data=st.data())
def test_the_shift_is_the_smallest_with_the_most_pairs_on_two_hosts(hosts: str, tp_size: int, data: st.DataObject):
    """By trying all; some ranks' hosts may be unknown."""
    num_replicas = len(hosts)
    grid = Grid.uniform(tp_size=tp_size, pp_size=1, dp_size=num_replicas)
    known = data.draw(st.sets(st.sampled_from(grid.ranks)))
    table = {rank: hosts[grid.coordinates(rank).dp] for rank in known}
    shard_map = plan_shard_map(grid, 0, 0, zero_stage=1, zero_backups=1, hosts=table)

    def pairs(shift: int) -> int:
        rows = [grid.dp_ranks(0, tp) for tp in range(tp_size)]
        return sum(
            table.get(r[n]) != table.get(r[(n + shift) % num_replicas]) for r in rows for n in range(num_replicas)
        )

    best = max(range(1, num_replicas), key=lambda shift: (pairs(shift), -shift))
    ranks = grid.dp_ranks(0, 0)
    assert shard_map.holders == tuple((ranks[n], ranks[(n + best) % num_replicas]) for n in range(num_replicas))
