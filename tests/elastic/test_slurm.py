"""SLURM's lists, and who is a task."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.elastic.guardian.slurm import expand_counts, expand_hosts, is_task

TASK = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("node[01-03,7],gpu2", ["node01", "node02", "node03", "node7", "gpu2"]),
        ("node[08-11]", ["node08", "node09", "node10", "node11"]),
        ("rack[1-2]-node[1-2].site", ["rack1-node1.site", "rack1-node2.site", "rack2-node1.site", "rack2-node2.site"]),
        ("127.0.0.[1-2]", ["127.0.0.1", "127.0.0.2"]),
    ],
)
def test_hosts(text: str, hosts: list[str]):
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    "text", ["", "node[1", "node[1-", "node[]", "a,", "node[1],", "node[a-b]", "node]1[", "node 1", "(null)"]
)
def test_what_is_no_list_of_hosts(text: str):
    with pytest.raises(ValueError, match="is no"):
        expand_hosts(text)


@given(st.lists(st.tuples(st.sampled_from(["a", "gpu-", "n.x"]), st.integers(0, 120), st.integers(0, 9)), min_size=1))
def test_hosts_come_back(ranges):
    text = ",".join(f"{name}[{first:03}-{first + more:03}]" for name, first, more in ranges)
    assert expand_hosts(text) == [
        f"{name}{n:03}" for name, first, more in ranges for n in range(first, first + more + 1)
    ]


def test_counts():
    assert expand_counts("4") == [4] and expand_counts("2(x3),1") == [2, 2, 2, 1]
    for text in ("", "x", "2(x)", "2(3)"):
        with pytest.raises(ValueError, match="is not a list of counts"):
            expand_counts(text)


def test_a_task_of_a_step():
    assert is_task(TASK) and is_task({**TASK, "SLURM_PROCID": "3", "SLURM_STEP_ID": "12"})


@pytest.mark.parametrize(
    "not_a_task",
    [
        {},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"},  # the shell of an older salloc
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NODEID": "0"},  # the script of sbatch
        {**TASK, "SLURM_STEP_ID": "4294967290"},  # the shell of salloc
        {**TASK, "SLURM_STEP_ID": "4294967291"},
        {**TASK, "SLURM_STEP_NUM_TASKS": "1"},  # srun --pty bash
        {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"},
    ],
)
def test_shells_and_scripts_inside_an_allocation_are_no_tasks(not_a_task):
    assert not is_task(not_a_task)
