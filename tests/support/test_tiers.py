"""The quick tier's choice of rows covers what it promises, and little more."""

from __future__ import annotations

import subprocess
import sys
from itertools import combinations, product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cell_table import CELLS
from tests.support.tiers import Row, axes_of, covering_rows, examples, spread_rows

AXES = {"tp": (1, 2, 4), "pp": (1, 2, 4), "schedule": ("1f1b", "gpipe"), "zero": (0, 1)}
VALUES = st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in AXES.items()})


def parts(rows: list[Row], size: int) -> set[frozenset[tuple[str, object]]]:
    return {frozenset(part) for row in rows for part in combinations(row.items(), size)}


@given(st.lists(VALUES, max_size=40))
def test_every_value_and_every_pair_appears(rows: list[Row]):
    chosen = covering_rows(rows)
    assert chosen == sorted(set(chosen))
    left = [rows[index] for index in chosen]
    assert all(parts(left, size) == parts(rows, size) for size in (1, 2))


@given(st.lists(VALUES, max_size=40))
def test_pairs_of_some_axes_and_values_of_all(rows: list[Row]):
    left = [rows[index] for index in covering_rows(rows, frozenset({"tp", "pp"}))]
    assert parts(left, 1) == parts(rows, 1)
    wanted = [{name: value for name, value in row.items() if name in ("tp", "pp")} for row in rows]
    assert parts(left, 2) >= parts(wanted, 2)


def test_a_product_takes_little_more_rows_than_its_largest_pair_of_axes():
    rows = [dict(zip(AXES, values)) for values in product(*AXES.values())]
    assert len(rows) == 36 and 9 <= len(covering_rows(rows)) <= 11
    assert len(covering_rows(rows, frozenset())) == 3


@given(st.integers(1, 50), st.integers(0, 50))
def test_spread_rows_have_both_ends(num_rows: int, num_wanted: int):
    chosen = spread_rows(num_rows, num_wanted)
    assert chosen == sorted(set(chosen)) and len(chosen) == min(num_rows, num_wanted)
    assert chosen[:1] == [0][:num_wanted] and set(chosen) <= set(range(num_rows))
    assert num_wanted < 2 or chosen[-1] == num_rows - 1


def test_a_parameter_may_list_its_axes():
    cell = next(cell for cell in CELLS if cell.name == "gloo-tp2-sp")
    assert axes_of("cell", cell)["transport"] == "gloo" and axes_of("cell", cell)["parallel.tp_size"] == "2"
    assert axes_of("rank", 3) == {"rank": "3"}


def test_the_tiers_draw_a_tenth_half_and_all_examples():
    assert (examples(300), examples(30)) in ((30, 10), (150, 15), (300, 30))


TABLES = """
import pytest
from hypothesis import given, strategies as st

def test_always(): pass
@pytest.mark.full
def test_long(): pass
@given(st.integers())
def test_property(number): pass
@pytest.mark.each_value
@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", range(3))
@pytest.mark.parametrize("c", range(3))
def test_each(a, b, c): pass
@pytest.mark.pairwise
@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", range(3))
@pytest.mark.parametrize("c", range(3))
def test_pairs(a, b, c): pass
@pytest.mark.each_value(rest=6)
@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", range(9))
def test_some(a, b): pass
@pytest.mark.sample(2, rest=5)
@pytest.mark.parametrize("seed", range(9))
def test_seeds(seed): pass
@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(9))
def test_all_seeds(seed): pass
@pytest.mark.full
@pytest.mark.sample(0, rest=4)
@pytest.mark.parametrize("seed", range(9))
def test_long_seeds(seed): pass
"""


@pytest.mark.full
def test_what_each_tier_runs_of_tables(tmp_path: Path):
    (tmp_path / "conftest.py").write_text("from tests.conftest import *  # noqa: F403\n")
    (tmp_path / "test_tables.py").write_text(TABLES)

    def collected(tier: str) -> dict[str, set[str]]:
        command = [sys.executable, "-m", "pytest", "--collect-only", "--tier", tier, "-p", "no:cacheprovider", "."]
        root = Path(__file__).parents[2]
        path = {"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin"}
        found = subprocess.run(command, cwd=tmp_path, env=path, text=True, capture_output=True, timeout=600)
        assert found.returncode == 0, found.stdout + found.stderr
        rows: dict[str, set[str]] = {}
        for line in (line for line in found.stdout.splitlines() if "<Function" in line):
            name = line.split("<Function ")[1].removesuffix(">")
            rows.setdefault(name.split("[")[0], set()).add(name)
        return rows

    quick, rest, full = (collected(tier) for tier in ("quick", "rest", "full"))
    assert {name: len(rows) for name, rows in quick.items()} == {
        "test_always": 1,
        "test_property": 1,
        "test_each": 3,
        "test_pairs": len(quick["test_pairs"]),
        "test_some": 9,
        "test_seeds": 2,
        "test_all_seeds": 2,
    }
    assert 9 <= len(quick["test_pairs"]) <= 11
    assert "test_always" not in rest and rest["test_property"] == quick["test_property"]
    assert len(rest["test_long"]) == 1 and len(rest["test_long_seeds"]) == 4
    assert 9 <= len(quick["test_each"] | rest["test_each"]) <= 14
    for name in ("test_pairs", "test_all_seeds"):
        assert quick[name] | rest[name] == full[name] and not quick[name] & rest[name]
    assert {f"test_some[{b}-{a}]" for b, a in ((0, 0), (8, 2))} <= quick["test_some"] | rest["test_some"]
    assert len(rest["test_some"]) <= 6
    assert len(quick["test_seeds"] | rest["test_seeds"]) == 5
    assert {name: len(rows) for name, rows in full.items()}["test_long_seeds"] == 9


@pytest.mark.full
def test_what_a_limited_time_leaves_out_is_counted(tmp_path: Path):
    (tmp_path / "conftest.py").write_text("from tests.conftest import *  # noqa: F403\n")
    (tmp_path / "test_tables.py").write_text(TABLES)
    path = {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-m", "pytest", "--tier", "quick", "-p", "no:cacheprovider", "--minutes"]
    for minutes, expected in (("0", "tests were not run: the 0 minutes of --minutes were over"), ("60", " passed, ")):
        done = subprocess.run([*command, minutes, "."], cwd=tmp_path, env=path, text=True, capture_output=True)
        assert done.returncode == 0 and expected in done.stdout, done.stdout
        assert ("were not run" in done.stdout) == (minutes == "0")
