"""Parses SLURM's compact lists, hosts as in `node[01-03,7],gpu2` and tasks per node as in `2(x3),1`; detects tasks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

FIRST_SPECIAL_STEP = 0xFFFFFF00
"""Steps that srun did not start have the highest numbers: salloc's shell ("interactive"), sbatch's script, "extern"."""


def is_task(variables: Mapping[str, str]) -> bool:
    """Returns True if this process is one of several tasks of a step that srun started.

    An interactive shell or a batch script also has SLURM_PROCID = 0 and the allocation's number of tasks, but no step,
    or a special one. A step of one task (`srun --pty bash`) does not count: what starts in it is a plain start.
    """
    step, rank = variables.get("SLURM_STEP_ID", ""), variables.get("SLURM_PROCID", "")
    if not (step.isdigit() and rank) or int(step) >= FIRST_SPECIAL_STEP:
        return False
    return first_of(variables, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") not in ("", "1")


def first_of(variables: Mapping[str, str], *names: str) -> str:
    """Returns the first non-empty variable, or ""."""
    return next((variables[name] for name in names if variables.get(name)), "")


def expand_hosts(text: str) -> list[str]:
    """Returns the hosts of a list, in its order; raises ValueError if it can't be parsed."""
    parts = re.split(r",(?![^\[]*\])", text)  # at commas outside of brackets
    hosts = [host for part in parts for host in _expand(part)]
    if not all(re.fullmatch(r"[\w.-]+", host) for host in hosts):
        raise ValueError(f"{text!r} is not a list of hosts")
    return hosts


def expand_counts(text: str) -> list[int]:
    """Returns the tasks of each node; raises ValueError if the list can't be parsed."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"{text!r} is not a list of counts")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _expand(part: str) -> Iterator[str]:
    """Yields all hosts of a part like rack[1-2]node[01-03,7]: the last bracket varies fastest."""
    match = re.fullmatch(r"([^\[\]]*)\[([^\[\]]*)\](.*)", part)
    if match is None:
        yield part
        return
    for piece in match[2].split(","):
        for number in _numbers(piece):
            for rest in _expand(match[3]):
                yield match[1] + number + rest


def _numbers(piece: str) -> Iterator[str]:
    """01-03 -> 01, 02, 03; 7 -> 7."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", piece)
    if match is None:
        raise ValueError(f"{piece!r} is not a range of numbers")
    first, last = match[1], match[2] or match[1]
    for number in range(int(first), int(last) + 1):
        yield str(number).zfill(len(first))
