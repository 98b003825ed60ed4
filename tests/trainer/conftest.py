"""Fixtures of the trainer's tests."""

import pytest
from cells import run_cell_in_threads


@pytest.fixture(scope="session")
def run_layout():
    """run_layout(steps=3, slots=3, **sections) -> LayoutRun in threads."""
    return run_cell_in_threads
