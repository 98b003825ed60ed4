"""Settings of all tests: the tier, one torch thread for each rank, property tests that draw the same in every run."""

from __future__ import annotations

import gc
import os
from collections import ChainMap, defaultdict
from collections.abc import Iterable

import pytest
import torch
from hypothesis import is_hypothesis_test, settings

from tests.support.tiers import axes_of, covering_rows, spread_rows

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton: its kernels then run on the CPU
QUICK_EXAMPLES = 10


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier",
        choices=("quick", "rest", "full"),
        default="full",
        help="quick: every axis once; rest: what quick leaves out; full: everything (the default)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """A busy machine is not a failure: no deadline. Tests with a number of their own ask tiers.examples."""
    settings.register_profile("full", deadline=None, derandomize=True)
    settings.register_profile("quick", settings.get_profile("full"), max_examples=QUICK_EXAMPLES)
    settings.load_profile("quick" if config.getoption("tier") == "quick" else "full")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Selects the tier's tests: marked `full`, or not a chosen row of their parametrization, means not quick."""
    tier = config.getoption("tier")
    if tier == "full":
        return
    quick = _quick_tests(items)
    if tier == "quick":
        chosen = [item for item in items if item in quick]
    else:
        chosen = [item for item in items if item not in quick or is_hypothesis_test(getattr(item, "obj", None))]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    items[:] = chosen


def pytest_collection_finish() -> None:
    """Modules and tests live to the end: the garbage collector need not look through them in each of its runs."""
    gc.collect()
    gc.freeze()


def _quick_tests(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    cases: dict[tuple[str, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and not item.get_closest_marker("full"):
            cases[str(item.path), item.originalname].append(item)
    return {item for tests in cases.values() for item in _quick_rows(tests)}


def _quick_rows(tests: list[pytest.Function]) -> list[pytest.Function]:
    """The rows of one test function that the quick tier runs."""
    if sample := tests[0].get_closest_marker("sample"):
        return [tests[index] for index in spread_rows(len(tests), sample.args[0])]
    pairwise, each_value = (tests[0].get_closest_marker(name) for name in ("pairwise", "each_value"))
    if pairwise is None and each_value is None:
        return tests
    paired = frozenset(pairwise.args) or None if pairwise else frozenset()
    rows = [dict(ChainMap(*(axes_of(*each) for each in test.callspec.params.items()))) for test in tests]
    return [tests[index] for index in covering_rows(rows, paired)]
