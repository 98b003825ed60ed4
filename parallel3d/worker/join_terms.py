"""The terms of joining: all that a worker that joins a run must know of it. Each generation's leader stores them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from parallel3d.elastic.protocol.restart_policy import StartInstruction
from parallel3d.layers.gemm import Gemm

JOIN_KEY = "join"
"""Its key in the store."""


@dataclass(frozen=True, kw_only=True)
class JoinTerms:
    """The agreement of the first workers. A joiner's state comes from the others, not from a checkpoint."""

    attempt: int
    """How often the run has been restarted."""
    gemm: Gemm
    """What computes the run's products."""
    num_threads: int
    """Of each worker, on CPUs: the bits of sums depend on it."""
    identity: dict[str, str]
    """What must be equal on all workers (admission.py)."""

    @property
    def start(self) -> StartInstruction:
        return StartInstruction(attempt=self.attempt)

    def encode(self) -> bytes:
        gemm = {"gemm": self.gemm.to_json(), "default": self.gemm.default}
        return json.dumps({**asdict(replace(self, gemm=Gemm())), **gemm}).encode()

    @staticmethod
    def decode(data: bytes) -> JoinTerms:
        terms = json.loads(data)
        default = terms.pop("default")
        return JoinTerms(**{**terms, "gemm": replace(Gemm.from_json(terms["gemm"]), default=default)})
