"""Settings of all tests: the tier, one torch thread for each rank, property tests that draw the same in every run."""

from __future__ import annotations

import gc
import os
import time
from collections import defaultdict
from collections.abc import Iterable

import pytest
import torch
from hypothesis import is_hypothesis_test, settings

from tests.support.tiers import chosen_rows

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton: its kernels then run on the CPU
QUICK_EXAMPLES, REST_EXAMPLES = 10, 50
STARTED = time.monotonic()
TOO_LATE = "not run: --minutes were over"


def _priority() -> tuple[int, int]:
    policy = os.sched_getscheduler(0) if hasattr(os, "sched_getscheduler") else 0
    return policy, os.getpriority(os.PRIO_PROCESS, 0)


PRIORITY = _priority()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier",
        choices=("quick", "rest", "full"),
        default="full",
        help="quick: every axis once; rest: more of what quick leaves out; full: everything (the default)",
    )
    parser.addoption("--minutes", type=float, help="start no test later than this; the others are skipped and counted")


def pytest_configure(config: pytest.Config) -> None:
    """A busy machine is not a failure: no deadline. Tests with a number of their own ask tiers.examples."""
    settings.register_profile("full", deadline=None, derandomize=True)
    settings.register_profile("quick", settings.get_profile("full"), max_examples=QUICK_EXAMPLES)
    settings.register_profile("rest", settings.get_profile("full"), max_examples=REST_EXAMPLES)
    settings.load_profile(config.getoption("tier"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Selects the tier's tests: all but those marked `full` and the rows that the tier leaves out of a table."""
    tier = config.getoption("tier")
    if tier == "full":
        return
    chosen = quick = _chosen((item for item in items if not item.get_closest_marker("full")), wider=False)
    if tier == "rest":
        again = {item for item in quick if is_hypothesis_test(getattr(item, "obj", None))}
        chosen = (_chosen(items, wider=True) - quick) | again
        slow_files = {item.path for item in chosen if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow_files)  # what --minutes leaves out are rows of tables
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.getoption("--minutes")
    if minutes is not None and time.monotonic() - STARTED > 60.0 * minutes:
        pytest.skip(TOO_LATE)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Fails a test that has changed this process's priority: all that follow would crawl beside other workers'."""
    assert _priority() == PRIORITY, f"{item.nodeid} has left this process with another priority"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many tests `--minutes` has left out."""
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if TOO_LATE in str(report.longrepr)]
    if skipped:
        minutes = terminalreporter.config.getoption("--minutes")
        terminalreporter.line(f"{len(skipped)} tests were not run: the {minutes:g} minutes of --minutes were over")


def pytest_collection_finish() -> None:
    """Modules and tests live to the end: the garbage collector need not look through them in each of its runs."""
    gc.collect()
    gc.freeze()


def _chosen(items: Iterable[pytest.Item], wider: bool) -> set[pytest.Item]:
    """The rows of each test function that the quick tier runs; wider: of which rest runs the others."""
    cases: dict[tuple[str, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function):
            cases[str(item.path), item.originalname].append(item)
    return {item for tests in cases.values() for item in chosen_rows(tests, wider)}
