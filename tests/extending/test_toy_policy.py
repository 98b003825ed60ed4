"""The worked example of docs/extending.md: a precision policy as one row, which trains like one process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.extending.copies import DOCS, ROOT, compare_with_one_process, make_copy
from tests.support import cells, tiny_runs

POLICIES = "parallel3d/config/specs/policies.py"
LAYOUTS = {"tp2-pp2-dp2": cells.CUBE, "dp4": dict(dp_size=4)}


@pytest.mark.full
def test_the_row_in_the_docs_trains_like_one_process(tmp_path: Path) -> None:
    """Within the row's tolerance; and it is not the policy bf16, whose gradients are fp32."""
    (row,) = re.findall(r"```python\n(PolicySpec\(.*?\n)```", DOCS.read_text(), re.DOTALL)
    table = (ROOT / POLICIES).read_text()
    assert table.count("_ROWS = (\n") == 1
    copy = make_copy(tmp_path / "copy", {POLICIES: table.replace("_ROWS = (\n", "_ROWS = (\n" + row)})
    found = compare_with_one_process(copy, LAYOUTS, precision=dict(policy="bf16_grads"))
    assert found == {"losses": found["losses"], **dict.fromkeys(LAYOUTS, [])}
    bf16 = tiny_runs.train_in_threads(precision=dict(policy="bf16"))
    assert found["losses"][0] == bf16.losses[0] and found["losses"] != bf16.losses
