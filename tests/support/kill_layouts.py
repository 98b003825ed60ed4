"""Layouts and models on which ranks die: the rows of the kill matrix, in threads and on processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal

from parallel3d.config.schema import Config
from parallel3d.parallel.grid import Grid
from parallel3d.trainer.plans import build_grid
from tests.support.tiny_runs import blend_from, make_config

EARLY = ("load", "forward", "send", "backward", "reduce_scatter", "backup", "all_reduce")
"""Phases of a step up to its entry."""
LATE = ("update", "all_gather", "evaluate")
"""Phases after it."""
BEFORE_GO = ("recovery_report", "recovery_moves", "recovery_confirm")
"""Phases of a recovery before the new generation is in force."""
AFTER_GO = "recovery_groups"


@dataclass(frozen=True, kw_only=True)
class KillLayout:
    """A row: a layout, and how the model and the run differ from a plain Llama in fp64."""

    group: str
    parallel: dict[str, Any]
    model: dict[str, Any] = field(default_factory=dict)
    precision: dict[str, Any] = field(default_factory=lambda: dict(policy="fp64"))
    warmup: dict[str, Any] = field(default_factory=dict)
    keeps_documents_apart: bool = False
    exchange: Literal["auto", "gloo"] = "auto"
    """Of processes: auto is through shared memory."""
    reads_blend: bool = False
    """The weights of its sources change within step 2."""

    @property
    def num_replicas(self) -> int:
        """Replicas of the widest stage."""
        return max(self.parallel.get("stage_replicas", [self.parallel.get("dp_size", 1)]))

    @property
    def num_layers(self) -> int:
        """Three, or one for each virtual stage."""
        return max(3, self.parallel.get("pp_size", 1) * self.parallel.get("virtual_stages", 1))


CUBE = dict(pp_size=2, dp_size=2, tp_size=2)
CUBE_SP = dict(**CUBE, sequence_parallel=True)
WIDE = dict(pp_size=2, dp_size=4)
LONG = dict(pp_size=3, dp_size=2)
INTERLEAVED = dict(schedule="interleaved", virtual_stages=2)
ZB_V = dict(schedule="zb-v", virtual_stages=2)


BASE_LAYOUTS = {
    name: KillLayout(group="base", parallel=parallel)
    for name, parallel in [("pp2-dp2-tp2", CUBE), ("pp3-dp2", LONG), ("pp2-dp4", WIDE)]
}


def _schedules() -> Iterator[tuple[str, KillLayout]]:
    for name, parallel in [
        ("interleaved", dict(pp_size=2, dp_size=2, **INTERLEAVED)),
        ("interleaved-pp3", LONG | INTERLEAVED),
        ("zb-h1", dict(**LONG, schedule="zb-h1")),
        ("zb-v", dict(pp_size=2, dp_size=2, **ZB_V)),
        ("zb-v-pp3", LONG | ZB_V),
    ]:
        yield name, KillLayout(group="schedule", parallel=parallel)


def _tied() -> Iterator[tuple[str, KillLayout]]:
    """One matrix on both ends of the pipeline: its state is cut over the replicas of both."""
    for name, parallel in [
        ("pp2-dp2-tp2", CUBE),
        ("pp3-dp2", LONG),
        ("stages-2-1-3", dict(pp_size=3, stage_replicas=[2, 1, 3])),
        ("stages-3-1-2", dict(pp_size=3, stage_replicas=[3, 1, 2])),
        ("pp2-dp2", dict(pp_size=2, dp_size=2)),
        ("pp2-dp4", WIDE),
        ("interleaved", dict(pp_size=2, dp_size=2, **INTERLEAVED)),
        ("zb-v", dict(pp_size=2, dp_size=2, **ZB_V)),
    ]:
        yield f"tied-{name}", KillLayout(group="tied", parallel=parallel, model=dict(tie_word_embeddings=True))


def _models() -> Iterator[tuple[str, KillLayout]]:
    copied_heads = dict(num_attention_heads=4, num_key_value_heads=2)
    for name, model, parallel in [
        ("gpt2-pp2-dp2-tp2", dict(architecture="gpt2", hidden_dropout=0.1), CUBE_SP),
        ("mistral-pp2-dp2-tp2", dict(architecture="mistral", num_key_value_heads=2, sliding_window=3), CUBE),
        ("copied-heads-dp2-tp4", copied_heads, dict(dp_size=2, tp_size=4, sequence_parallel=True)),
    ]:
        yield name, KillLayout(group="model", parallel=parallel, model=model)


def _documents() -> Iterator[tuple[str, KillLayout]]:
    for name, parallel in [("pp2-dp2-tp2", CUBE_SP), ("pp3-dp2", LONG), ("zb-v", dict(pp_size=2, dp_size=3, **ZB_V))]:
        row = KillLayout(
            group="documents", parallel=parallel, model=dict(architecture="gpt2"), keeps_documents_apart=True
        )
        yield f"documents-{name}", row


def _recomputed() -> Iterator[tuple[str, KillLayout]]:
    for name, parallel in [
        ("full", dict(**CUBE_SP, recompute="full")),
        ("selective", dict(**CUBE, schedule="zb-h1", recompute="selective")),
    ]:
        row = KillLayout(group="recompute", parallel=parallel, model=dict(hidden_dropout=0.1))
        yield f"recompute-{name}", row


def _precisions() -> Iterator[tuple[str, KillLayout]]:
    for name, row in BASE_LAYOUTS.items():
        for policy in ("bf16", "bf16_sr"):
            yield f"{policy}-{name}", replace(row, group="precision", precision=dict(policy=policy))
    everywhere = dict(policy="bf16_sr", stochastic_rounding=["accumulation", "outputs"])
    yield "bf16_sr-everywhere", KillLayout(group="precision", parallel=WIDE, precision=everywhere)


def _blends() -> Iterator[tuple[str, KillLayout]]:
    for name in ("pp2-dp2-tp2", "pp2-dp4"):
        yield f"blend-{name}", replace(BASE_LAYOUTS[name], group="blend", reads_blend=True)


def _on_processes() -> Iterator[tuple[str, KillLayout]]:
    """Rows that only the runs on processes have."""
    for name, parallel in [
        ("dp4", dict(dp_size=4)),
        ("pp2-dp2-tp2-sp", CUBE_SP),
        ("pp2-dp2-interleaved", dict(pp_size=2, dp_size=2, **INTERLEAVED)),
        ("pp2-dp2-zb-h1", dict(pp_size=2, dp_size=2, schedule="zb-h1")),
    ]:
        yield name, KillLayout(group="processes", parallel=parallel)
    for name, parallel in [("dp4", dict(dp_size=4)), ("pp2-dp2", dict(pp_size=2, dp_size=2))]:
        yield f"gloo-{name}", KillLayout(group="processes", parallel=parallel, exchange="gloo")
    growing = dict(  # steps of 2, 4, 6 and 8 sequences of 8, 12, 12 and 16 tokens
        sequence_length=dict(kind="linear", start=8, duration=4, multiple=4),
        batch_size=dict(start=2, duration=4, increment=2),
    )
    yield "warmup-pp2-dp2-tp2", KillLayout(group="processes", parallel=CUBE_SP, warmup=growing)


KILL_LAYOUTS: dict[str, KillLayout] = {
    **BASE_LAYOUTS,
    "dp3-tp2": KillLayout(group="spares", parallel=dict(dp_size=3, tp_size=2)),
    **dict(chain(_schedules(), _tied(), _models(), _documents(), _recomputed(), _precisions(), _blends())),
    **dict(_on_processes()),
}
BASE = list(BASE_LAYOUTS)
SCHEDULES = [name for name, row in KILL_LAYOUTS.items() if row.group == "schedule"]


def config_of(layout: str, *, num_steps: int = 3, zero_stage: int = 1, zero_backups: int = 1, **elastic: Any) -> Config:
    """A run in threads of 0.1 s with exact sums: two sequences of four tokens a replica (64 tokens where documents end
    within them; where steps grow, up to four of 16), evaluations after every second step."""
    row = KILL_LAYOUTS[layout]
    sequence_length = 64 if row.keeps_documents_apart else 16 if row.warmup else 4
    shape = dict(hidden_size=8, intermediate_size=16, num_hidden_layers=row.num_layers, num_attention_heads=2)
    return make_config(
        model=shape | row.model,
        parallel=dict(bucket_mib=0.003, zero_stage=zero_stage, **row.parallel),
        batch=dict(
            global_batch_size=(4 if row.warmup else 2) * row.num_replicas,
            micro_batch_size=1,
            sequence_length=sequence_length,
        ),
        warmup=row.warmup,
        precision=dict(**row.precision, sums="exact"),
        run=dict(num_steps=num_steps, evaluate_every=2, evaluate_batches=1),
        elastic=dict(zero_backups=zero_backups, **elastic),
        data=dict(
            document_mask=row.keeps_documents_apart,
            blend=blend_from(3 * row.num_replicas * 4) if row.reads_blend else None,
        ),
    )


def grid_of(layout: str) -> Grid:
    return build_grid(config_of(layout))


def phases_of(grid: Grid, rank: int) -> list[str]:
    """The phases of a step that a rank enters: only the first stage reads tokens (under ZB-V it is also the last)."""
    return [phase for phase in (*EARLY, *LATE) if phase != "load" or grid.coordinates(rank).pp == 0]
