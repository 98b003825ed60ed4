"""Hang reports: chains of waits are followed to a rank that does not wait, or reported as cycles."""

from hypothesis import given
from hypothesis import strategies as st

from parallel3d.elastic.hang_report import HangReportLine, WorkerStatus, blockers, build_hang_report, format_hang_report


def waiting(rank, *peers, what="", doing="receive activation 5"):
    return WorkerStatus(rank=rank, doing=doing, for_s=31.0, is_waiting=True, what=what, peers=peers)


def busy(rank, doing="forward 6"):
    return WorkerStatus(rank=rank, doing=doing, for_s=31.5)


def remarks(*statuses):
    return {standing.rank: standing.remark for standing in build_hang_report(statuses)}


def test_a_chain_is_followed_to_whoever_waits_for_nobody():
    assert remarks(waiting(0, 2), waiting(2, 1), busy(1), busy(3)) == {
        0: "waits for rank 2 -> rank 1",
        1: "blocks others",
        2: "waits for rank 1",
        3: "",
    }


def test_a_collective_waits_for_those_who_are_not_in_it():
    group = (0, 1, 2, 3)
    all_reduces = [waiting(rank, *group, what="generation0/world", doing="all_reduce") for rank in (0, 3)]
    found = remarks(*all_reduces, waiting(1, 2), busy(2))
    assert found[0] == found[3] == "waits in generation0/world for rank 1 -> rank 2, rank 2"
    assert found[1] == "waits for rank 2" and found[2] == "blocks others"


def test_members_of_two_groups_wait_for_each_other():
    found = remarks(waiting(0, 0, 1, what="tp"), waiting(1, 0, 1, what="dp"))
    assert found[0] == "waits in tp for rank 1 -> rank 0 (a cycle)"


def test_everybody_is_there():
    found = remarks(*(waiting(rank, 0, 1, what="generation0/world") for rank in (0, 1)))
    assert set(found.values()) == {"waits in generation0/world, which all other ranks have entered"}


def test_those_that_do_not_answer_and_those_that_are_not_there():
    found = remarks(WorkerStatus(rank=0), WorkerStatus(rank=1), waiting(2, 0), waiting(3, 9))
    assert found == {
        0: "does not answer, blocks others",
        1: "does not answer",
        2: "waits for rank 0",
        3: "waits for rank 9",
    }
    (alone,) = build_hang_report([waiting(4, what="the coordinator")])
    assert alone.remark == "waits for the coordinator"


def test_many_are_not_all_named():
    found = remarks(waiting(0, *range(9), what="dp"), *(busy(rank) for rank in range(1, 9)))
    assert found[0] == "waits in dp for rank 1, rank 2, rank 3, ..."


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 6), max_size=4)), min_size=1, max_size=6))
def test_every_chain_ends(waits):
    """Any wait-for graph gives a report, and no rank blocks itself."""
    statuses = [
        WorkerStatus(rank=rank, doing="x", is_waiting=is_waiting, what="g" * (rank % 2), peers=tuple(peers))
        for rank, (is_waiting, peers) in enumerate(waits)
    ]
    by_rank = {status.rank: status for status in statuses}
    assert len(build_hang_report(statuses)) == len(statuses)
    assert all(status.rank not in blockers(status, by_rank) for status in statuses)


def test_columns_are_aligned_and_ranks_in_order():
    table = format_hang_report(
        [
            HangReportLine(
                rank=10, coordinates="pp1 dp0 tp0", doing="forward 3", for_s=4.25, remark="blocks others"
            ),
            HangReportLine(
                rank=2, coordinates="pp0 dp0 tp0", doing="receive gradient 3 <- (1, 0)", for_s=31.0, remark="waits"
            ),
        ]
    )
    assert table.splitlines() == [
        "  rank 2 (pp0 dp0 tp0)  [receive gradient 3 <- (1, 0)] 31.0 s waits",
        "  rank 10 (pp1 dp0 tp0) [forward 3]                     4.2 s blocks others",
    ]
    assert format_hang_report([HangReportLine(rank=0)]) == "  rank 0 [-]"
