"""Several machines in one table, as the command prints it."""

import json
from pathlib import Path

import pytest

from parallel3d.commands import plan

CONFIGS = Path(__file__).parents[2] / "configs"
UNPRICED = dict(memory_gib=80.0, bandwidth=3.35e12, link_bandwidth=450e9, bf16_tflops=989.4, fp32_tflops=66.9)
GRID = ("parallel.tp_size=8", "parallel.pp_size=2", "parallel.dp_size=2")


def compare(capsys, *arguments):
    """The exit code, the rows of the table and the line below it, or the error."""
    code = plan.main(["--config", str(CONFIGS / "hlat_7b.json"), "--tokens", "1e12", *arguments, *GRID])
    out, err = capsys.readouterr()
    _, is_there, table = out.partition("by dollars (predicted):\n")
    if not is_there:
        return code, [], err.strip()
    _, *rows, last = table.splitlines()
    return code, rows, last


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"name": "OURS", **UNPRICED}, {"name": "SMALL", **UNPRICED, "memory_gib": 2.0}]))
    return str(path)


def test_machines_are_compared_by_dollars_and_the_cheapest_is_named(capsys, table):
    names = ("8xSMALL:2", "8xOURS:2", "1xH100:40", "8xH200:2", "8xH100:2", "8xA100-80GB:4")
    code, rows, last = compare(capsys, "--devices", ",".join(names), "--device-table", table)
    assert code == 0 and len(rows) == len(names)
    priced = [row.split() for row in rows[:3]]
    dollars = [float(row[3].replace(",", "")) for row in priced]
    assert dollars == sorted(dollars) and {row[0].split("-")[0] for row in priced} == {"8xH100", "8xH200", "8xA100"}
    for row, paid in zip(priced, dollars):
        assert float(row[4]) == pytest.approx(paid / 1e6, abs=1e-4)
        assert float(row[1].replace(",", "")) * float(row[2].replace(",", "")) * 86400 == pytest.approx(1e12, rel=0.01)
        assert row[5:7] == ["tp8", "pp2"]
    assert rows[3].startswith("8xOURS:2") and "no price" in rows[3]
    assert {row.split()[0] for row in rows[4:]} == {"8xSMALL:2", "1xH100-80GB:40"}
    assert any("does not fit" in row and "of 2 GiB" in row for row in rows[4:])
    assert any("40 devices do not divide into replicas" in row for row in rows[4:])
    assert last.startswith(f"cheapest (of those with a price): {priced[0][0]}, $")


def test_the_best_layouts_of_a_search_are_compared(capsys, table):
    code, rows, last = compare(
        capsys, "--devices", "8xSMALL:1,8xH100:1", "--device-table", table, "--search", "batch.global_batch_size=8"
    )
    assert code == 0 and rows[0].startswith("8xH100-80GB:1") and rows[1].endswith("no layout fits")
    assert last.startswith("cheapest: 8xH100-80GB:1, $")


def test_where_nothing_is_cheapest(capsys, table):
    for devices, said in (("8xSMALL:2,8xSMALL:4", "runs on none"), ("8xOURS:2,8xOURS:4", "no price of a machine")):
        code, _, last = compare(capsys, "--devices", devices, "--device-table", table)
        assert code == 0 and said in last
    code, rows, error = compare(capsys, "--devices", "3xH100,5xH100")
    assert code == 2 and not rows and error.startswith("--devices 3xH100-80GB:1: 3 devices do not divide")
    _, rows, _ = compare(capsys, "--devices", "8xH100:2")
    assert not rows, "there is nothing to compare one machine with"
