"""What `parallel3d.elastic` offers to scripts, and what it does not import for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from parallel3d import elastic
from parallel3d.elastic.drop_in.elastic_loop import DataParallel


def test_names_are_found_when_they_are_used() -> None:
    assert elastic.DataParallel is DataParallel
    assert all(callable(getattr(elastic, name)) for name in elastic.__all__)
    with pytest.raises(AttributeError, match="no attribute 'sampler'"):
        _ = elastic.sampler


def test_a_launching_process_does_not_import_torch() -> None:
    code = "import sys; from parallel3d import elastic; elastic.init; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
