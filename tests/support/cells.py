"""A run that must equal one process: what it changes, on which transport, and how close it must be."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal

from parallel3d.comparison.compare_runs import Tolerance, tolerance_of
from parallel3d.comparison.run_result import RunResult
from parallel3d.config.schema import Config
from tests.support.tiny_runs import make_config, train_in_threads

STAGES_1_2 = dict(pp_size=2, stage_replicas=[1, 2])
STAGES_3_1_2 = dict(pp_size=3, stage_replicas=[3, 1, 2])
CUBE = dict(tp_size=2, pp_size=2, dp_size=2, sequence_parallel=True)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run to be compared with one process: what it changes, on which transport, and how near it must come."""

    name: str
    transport: Literal["threads", "gloo"] = "threads"
    changes: dict[str, dict] = field(default_factory=dict)
    steps: int = 3
    loss_tolerance: float | None = None
    """In place of the policy's; gradients and weights are not compared then."""

    @property
    def tolerance(self) -> Tolerance:
        if self.loss_tolerance is None:
            return tolerance_of(self.config)
        rest = dict.fromkeys(("first_gradients", "gradients", "weights"), inf)
        return Tolerance(loss=self.loss_tolerance, **rest, why="many steps")

    @property
    def reference(self) -> Cell:
        """The same run on one rank, micro-batches of one sequence."""
        changes = {name: values for name, values in self.changes.items() if name not in ("parallel", "elastic")}
        batch = {name: value for name, value in changes.pop("batch", {}).items() if name != "micro_batch_size"}
        changes |= {"batch": batch} if batch else {}
        return replace(self, name=f"reference of {self.name}", transport="threads", changes=changes)

    @property
    def config(self) -> Config:
        return make_config(**self.changes)

    @property
    def axes(self) -> dict[str, str]:
        """The axes that the quick tier covers: the transport and every setting that the cell changes. Sizes that serve
        another setting, such as the number of layers, are none."""
        changes = {section: values for section, values in self.changes.items() if section not in ("run", "optimizer")}
        settings = {f"{s}.{name}": repr(value) for s, values in changes.items() for name, value in values.items()}
        for name in settings.keys() & SIZES:
            settings[name] = str(settings[name] != "None")
        return {"transport": self.transport, **settings}


SIZES = {
    "model.num_hidden_layers",
    "model.num_key_value_heads",
    "parallel.bucket_mib",
    "parallel.layers_per_stage",
    "parallel.stage_replicas",
    "parallel.virtual_stages",
}


def cell(
    name: str,
    *,
    policy: str = "fp64",
    drop: float = 0.0,
    micro: int = 1,
    backups: int = 1,
    layers: int = 4,
    tied: bool = False,
    transport="threads",
    architecture="llama",
    kv: int | None = None,
    documents: bool = False,
    **parallel,
) -> Cell:
    """The eps of GPT-2's cells keeps AdamW from making steps of rounding: biases of keys have no gradient at all, as
    they move all scores of a query alike."""
    changes = dict(
        parallel=parallel,
        model=dict(
            hidden_dropout=drop,
            architecture=architecture,
            num_key_value_heads=kv,
            num_hidden_layers=layers,
            tie_word_embeddings=tied,
        ),
        optimizer=dict(eps=1e-8 if architecture == "llama" else 1e-5),
        precision=dict(policy=policy),
        batch=dict(micro_batch_size=micro),
        elastic=dict(zero_backups=backups),
        data=dict(document_mask=documents),
    )
    return Cell(name=name, transport=transport, changes=changes)


def run_cell(cell: Cell) -> RunResult:
    """Runs a cell in threads."""
    return train_in_threads(steps=cell.steps, **cell.changes)
