"""Settings of all tests: the tier, one torch thread for each rank, property tests that draw the same in every run."""

from __future__ import annotations

import gc
import os
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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier",
        choices=("quick", "rest", "full"),
        default="full",
        help="quick: every axis once; rest: more of what quick leaves out; full: everything (the default)",
    )


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
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


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
