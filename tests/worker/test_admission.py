"""What joiners must show: each check refuses what it should, and says what it found."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from parallel3d.layers.gemm import Gemm
from parallel3d.worker import admission
from parallel3d.worker.admission import (
    ARITHMETIC,
    AdmissionError,
    check_arithmetic,
    check_equal,
    check_transfer,
    compute,
)
from parallel3d.worker.join_terms import JoinTerms
from tests.support.tiny_runs import make_config


class SlowControl:
    """A control channel whose store answers late."""

    rank, token = 4, None

    def __init__(self, seconds: float):
        self._seconds = seconds
        self.key = ""

    def set(self, key: str, value: bytes) -> None:
        self.key = key

    def get(self, key: str, token: object) -> bytes:
        assert key == self.key
        time.sleep(self._seconds)
        return b""


def test_other_code_data_or_configuration_is_named(tmp_path: Path):
    source = tmp_path / "a.py"
    source.write_text("one = 1")
    config = make_config()
    run = admission.describe(config, [tmp_path], {"tokens": 5})
    check_equal(run, run)
    source.write_text("one = 2")
    other = admission.describe(config, [tmp_path], {"tokens": 6})
    with pytest.raises(AdmissionError, match=r"^not admitted: code \w+, the run has \w+; data \w+, the run has \w+$"):
        check_equal(other, run)


def test_one_wrong_bit_is_found(monkeypatch: pytest.MonkeyPatch):
    check_arithmetic(torch.device("cpu"))
    product = torch.Tensor.__matmul__

    def flipped(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        result = product(left, right)
        result[3, 5] += 1
        return result

    monkeypatch.setattr(torch.Tensor, "__matmul__", flipped)
    assert compute(torch.device("cpu")) != ARITHMETIC
    with pytest.raises(AdmissionError, match="not admitted: cpu computes"):
        check_arithmetic(torch.device("cpu"))


def test_a_slow_connection_is_refused(monkeypatch: pytest.MonkeyPatch):
    check_transfer(SlowControl(0.0))
    monkeypatch.setattr(admission, "MIN_BYTES_PER_S", 2**30)
    with pytest.raises(AdmissionError, match="MiB/s"):
        check_transfer(SlowControl(0.05))


def test_terms_travel():
    terms = JoinTerms(attempt=2, gemm=Gemm(kernels="c", default="blas"), num_threads=3, identity={"code": "1"})
    assert JoinTerms.decode(terms.encode()) == terms
