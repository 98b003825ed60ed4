"""What joiners must show: each check refuses what it should, and says what it found."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel3d.elastic.coordinator.kv_store import KeyValueStore
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


class StoreControl:
    """A control channel to a real store, which answers late. `on_set`: what happens after the first set."""

    rank, token = 4, None

    def __init__(self, seconds: float = 0.0, on_set: Callable[[StoreControl], None] = lambda control: None):
        self._seconds = seconds
        self._on_set = on_set
        self._answers: list[tuple[dict[str, Any], bytes]] = []
        self.store = self.new_store()

    def new_store(self) -> KeyValueStore:
        return KeyValueStore({}, send=lambda connection, header, payload: self._answers.append((header, payload)))

    def set(self, key: str, value: bytes) -> None:
        self.store.handle(None, {"op": "set", "key": key}, value)
        on_set, self._on_set = self._on_set, lambda control: None
        on_set(self)

    def check(self, keys: list[str], token: object) -> bool:
        return bool(self._ask({"op": "check", "keys": keys})[0]["found"])

    def get(self, key: str, token: object) -> bytes:
        time.sleep(self._seconds)
        return self._ask({"op": "get", "key": key})[1]

    def _ask(self, header: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        self.store.handle(None, {**header, "id": 1}, b"")
        assert self._answers, f"{header} is never answered"
        return self._answers.pop()


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
    check_transfer(StoreControl(0.0))
    monkeypatch.setattr(admission, "MIN_BYTES_PER_S", 2**30)
    with pytest.raises(AdmissionError, match="MiB/s"):
        check_transfer(StoreControl(0.05))


def begin_generation(control: StoreControl) -> None:
    control.store.drop_generations_before(3)


def take_over(control: StoreControl) -> None:
    control.store = control.new_store()


@pytest.mark.parametrize("on_set", [begin_generation, take_over])
def test_what_changes_meanwhile_leaves_no_joiner_waiting(on_set: Callable[[StoreControl], None]):
    """A generation that begins drops the keys of those before it, and another coordinator has none."""
    control = StoreControl(on_set=on_set)
    check_transfer(control)
    assert control.get(f"admission/{control.rank}", None) == b"", "the store keeps a sample"


def test_terms_travel():
    terms = JoinTerms(attempt=2, gemm=Gemm(kernels="c", default="blas"), num_threads=3, identity={"code": "1"})
    assert JoinTerms.decode(terms.encode()) == terms
