"""The stub alone, with children that are programs of the test."""

import subprocess
import sys
from pathlib import Path

from tests.support.early_request import EXIT_CODE


def test_a_request_that_comes_before_the_killed_coordinator_is_collected_is_kept():
    """Refused, it would come again only a second later."""
    command = [sys.executable, "-m", "tests.support.early_request"]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (EXIT_CODE, "")
