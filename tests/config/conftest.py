"""Fixtures of the configuration's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.config_files import TINY, write


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write(tmp_path, TINY)
