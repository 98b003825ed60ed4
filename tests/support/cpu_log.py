"""pytest plugin: CPU seconds of each test, its child processes included. Wall clock depends on what else runs.

CPU_LOG=cpu.txt python -m pytest -p tests.support.cpu_log ...; sort -rn cpu.txt | head -50
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Appends one line for each test. Children count when they have ended and were waited for."""
    before = sum(os.times()[:4])
    result = yield
    with open(os.environ["CPU_LOG"], "a") as log:
        log.write(f"{sum(os.times()[:4]) - before:9.2f} {item.nodeid}\n")
    return result
