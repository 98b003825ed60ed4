"""A run raises its limit of open files, or says at the start that it can't."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from parallel3d.elastic.guardian.open_files import SPARE, num_files_needed
from parallel3d.parallel.grid import Grid

RUN = """
import resource, sys
from parallel3d.elastic.guardian.open_files import raise_open_files
from parallel3d.parallel.grid import Grid
soft, hard, dp_size = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
try:
    raise_open_files(Grid.uniform(tp_size=1, pp_size=1, dp_size=dp_size))
except Exception as error:
    sys.exit(str(error))
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def run(soft: int, hard: int, dp_size: int) -> subprocess.CompletedProcess:
    """In a process of its own: a hard limit can't be raised again."""
    command = [sys.executable, "-c", RUN, *map(str, (soft, hard, dp_size))]
    return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize("dp_size, limit", [(8, 1024), (500, 2 * (500 + 1) + SPARE)])
def test_the_limit_is_raised_as_far_as_needed(dp_size, limit):
    done = run(1024, min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]), dp_size)
    assert done.stdout.strip() == str(limit), done.stderr


def test_a_limit_that_can_not_be_raised_is_one_clear_message():
    done = run(1024, 2048, 1024)
    assert done.returncode == 1
    assert "a run of 1,024 ranks may open 2,306 files in one process, and the limit is 2,048" in done.stderr
    assert "ulimit -Hn 2306" in done.stderr


@pytest.mark.parametrize(
    "tp_size, pp_size, dp_size, num_files",
    [
        (8, 8, 160, 10_240),  # the coordinator's connections
        (1, 1, 100, 2 * (100 + 1)),
        (2, 4, 100, 2 * (100 + 2 + 200)),  # 200 replicas of the first and the last stage share the embedding
    ],
)
def test_the_coordinator_needs_one_a_rank_and_a_worker_two_a_peer(tp_size, pp_size, dp_size, num_files):
    grid = Grid.uniform(tp_size=tp_size, pp_size=pp_size, dp_size=dp_size)
    assert num_files_needed(grid) == max(num_files, len(grid.ranks)) + SPARE
