"""The smallest set of hosts to evict, against a search of all sets."""

from __future__ import annotations

from itertools import chain, combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from parallel3d.elastic.protocol.probe_graph import MAX_EXACT, describe_cut, plan_eviction
from tests.support.tiers import examples

HOSTS = tuple("abcdefg")
PATHS = [frozenset(pair) for pair in combinations(HOSTS, 2)]


def path(pair: str) -> frozenset[str]:
    return frozenset(pair)


def plan(*pairs: str, coordinator="a", workers=None, spare=lambda hosts: True):
    return plan_eviction([*map(path, pairs)], num_workers=workers or {}, coordinator=coordinator, can_spare=spare)


def test_one_path():
    assert plan("bc").hosts == ("c",) and plan("bc").reason == "b and c can't reach each other"
    assert plan("bc", workers={"b": 1, "c": 8}).hosts == ("b",)
    assert plan("ab").hosts == ("b",) and plan("ab", coordinator="b").hosts == ("a",)


def test_a_host_that_several_others_can_not_reach_goes_alone():
    assert plan("bd", "cd").hosts == ("d",)
    assert plan("ab", "ac", coordinator="a").hosts == ("a",)


def test_a_host_that_the_run_needs_stays():
    assert plan("bc", spare=lambda hosts: "c" not in hosts).hosts == ("b",)
    assert plan("bd", "cd", spare=lambda hosts: "d" not in hosts).hosts == ("b", "c")
    assert plan("bc", spare=lambda hosts: False).hosts == ()


def all_sets(hosts):
    return chain.from_iterable(combinations(hosts, size) for size in range(len(hosts) + 1))


@settings(max_examples=examples(300))
@given(st.sets(st.sampled_from(PATHS), min_size=1), st.sets(st.sampled_from(HOSTS)), st.randoms(use_true_random=False))
def test_no_smaller_set_would_do(cut, needed, draw):
    def can_spare(hosts):
        return not hosts & needed

    order = sorted(cut, key=sorted)
    draw.shuffle(order)
    found = plan_eviction(order, num_workers={}, coordinator="a", can_spare=can_spare).hosts
    covers = [set(hosts) for hosts in all_sets(HOSTS) if all(pair & set(hosts) for pair in cut)]
    spared = [hosts for hosts in covers if can_spare(hosts)]
    if not found:
        assert not [hosts for hosts in spared if hosts < set().union(*cut)]
    else:
        assert set(found) in spared and len(found) == min(map(len, spared))
        assert "a" not in found or not [hosts for hosts in spared if len(hosts) == len(found) and "a" not in hosts]


def test_a_message_names_a_few_pairs():
    pairs = {frozenset((f"a{number}", f"b{number}")) for number in range(6)}
    named = "a0 and b0; a1 and b1; a2 and b2; a3 and b3"
    assert describe_cut(pairs) == f"{named} can't reach each other, nor do 2 more pairs"


def test_many_hosts():
    names = [f"host{number:02d}" for number in range(2 * MAX_EXACT)]
    cut = {frozenset((names[3], name)) for name in names if name != names[3]}
    assert plan_eviction(cut, num_workers={}, coordinator=names[0], can_spare=lambda hosts: True).hosts == (names[3],)
