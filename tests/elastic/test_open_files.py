"""A run raises its limit of open files, or says at the start that it can't."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from parallel3d.elastic.guardian.open_files import num_files_needed

RUN = """
import resource, sys
from parallel3d.elastic.guardian.open_files import raise_open_files
soft, hard, world_size = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
try:
    raise_open_files(world_size)
except Exception as error:
    sys.exit(str(error))
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def run(soft: int, hard: int, world_size: int) -> subprocess.CompletedProcess:
    """In a process of its own: a hard limit can't be raised again."""
    command = [sys.executable, "-c", RUN, *map(str, (soft, hard, world_size))]
    return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize("world_size, limit", [(8, 1024), (300, num_files_needed(300))])
def test_the_limit_is_raised_as_far_as_needed(world_size, limit):
    done = run(1024, min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]), world_size)
    assert done.stdout.strip() == str(limit), done.stderr


def test_a_limit_that_can_not_be_raised_is_one_clear_message():
    done = run(1024, 2048, 1024)
    assert done.returncode == 1
    assert "a run of 1,024 ranks may open 3,328 files in one process, and the limit is 2,048" in done.stderr
    assert "ulimit -Hn 3328" in done.stderr
