"""The stub alone, with children that are programs of the test."""

import subprocess
import sys
from pathlib import Path

import pytest

from parallel3d.errors import EXIT_COORDINATOR_LOST
from tests.support.early_request import ANSWERED, COLLECTED, ENDED, EXIT_CODE


def run_stub(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "tests.support.early_request", *arguments]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=600)
    return ended.returncode, ended.stderr


def test_a_request_that_comes_before_the_killed_coordinator_is_collected_is_kept():
    """Refused, it would come again only a second later."""
    assert run_stub() == (EXIT_CODE, "")


def test_a_request_that_a_coordinator_has_answered_is_not_kept():
    """Its plan may be an old one when that coordinator is lost: the guardian asks again."""
    assert run_stub(ANSWERED) == (EXIT_COORDINATOR_LOST, "the run's coordinator is gone\n")


@pytest.mark.parametrize("when", [[], [COLLECTED]])
def test_a_request_of_a_guardian_that_has_given_up_is_void(when):
    """A stub that was stopped would start a coordinator that no one needs, and wait for it."""
    assert run_stub(ENDED, *when) == (EXIT_CODE, "")
