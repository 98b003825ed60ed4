"""Compares layouts with one process: `python -m tests.extending.compare_layouts '[LAYOUTS, CHANGES]'`."""

from __future__ import annotations

import json
import sys
from typing import Any

from parallel3d.comparison.compare_runs import compare_runs
from tests.support.cells import Cell, run_cell


def main(layouts: dict[str, dict[str, Any]], changes: dict[str, dict[str, Any]]) -> None:
    cells = [Cell(name=name, changes=changes | dict(parallel=parallel)) for name, parallel in layouts.items()]
    one_process = run_cell(cells[0].reference)
    found = {cell.name: compare_runs(run_cell(cell), one_process, cell.tolerance).findings for cell in cells}
    print(json.dumps({"losses": one_process.losses, **found}))


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
