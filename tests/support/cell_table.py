"""The table of the runs that must equal one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import prod

from tests.support.cells import CUBE, STAGES_1_2, STAGES_3_1_2, Cell, cell
from tests.support.tiny_runs import blend_from

SIZES = [sizes for sizes in product((1, 2, 4), repeat=3) if prod(sizes) <= 8]
# Each pair of values of two switches stands in some row; the rows rotate over the layouts, three for each.
SWITCHES = [
    dict(schedule="1f1b", zero_stage=1, sequence_parallel=True, kv=4),
    dict(schedule="gpipe", zero_stage=0, sequence_parallel=True, kv=2),
    dict(schedule="1f1b", zero_stage=0, sequence_parallel=False, kv=2),
    dict(schedule="gpipe", zero_stage=1, sequence_parallel=False, kv=4),
    dict(schedule="1f1b", zero_stage=1, sequence_parallel=True, kv=2),
]


def layout_cell(number: int, row: int) -> Cell:
    tp, pp, dp = SIZES[number]
    switches = dict(SWITCHES[(row * 2 + number) % len(SWITCHES)])
    kv = switches.pop("kv")
    sp = "-sp" if switches["sequence_parallel"] else ""
    return Cell(
        name=f"tp{tp}-pp{pp}-dp{dp}{sp}-{switches['schedule']}-zero{switches['zero_stage']}-kv{kv}-row{row}",
        changes=dict(parallel=dict(tp_size=tp, pp_size=pp, dp_size=dp, **switches), model=dict(num_key_value_heads=kv)),
    )


def tied_cells() -> Iterator[Cell]:
    """One matrix on both ends of the pipeline: every shape of it with and without ZeRO; the rest takes turns."""
    shapes = [(1,), (2,), (1, 1), (2, 2), (2, 1), (1, 2), (1, 1, 1), (3, 1, 2), (1, 1, 1, 1), (2, 1, 1, 3)]
    for number, (counts, zero) in enumerate(product(shapes, (1, 0))):
        tp, rule = (1, 2)[number // 2 % 2], ("1f1b", "zb-h1", "gpipe")[number % 3]
        yield cell(
            f"tied-{'-'.join(map(str, counts))}-tp{tp}-{rule}-zero{zero}",
            tied=True,
            pp_size=len(counts),
            stage_replicas=list(counts),
            tp_size=tp,
            sequence_parallel=number % 8 < 4,
            schedule=rule,
            zero_stage=zero,
        )
    yield cell("tied-tp4", tied=True, tp_size=4)
    yield cell("tied-gpt2-cube", tied=True, architecture="gpt2", **CUBE)
    yield cell("tied-gpt2-stages-1-2-zb-h1", tied=True, architecture="gpt2", **STAGES_1_2, schedule="zb-h1")
    yield cell("tied-copied-heads-cube", tied=True, kv=1, **CUBE)
    interleaved = dict(schedule="interleaved", virtual_stages=2)
    yield cell("tied-interleaved-cube", tied=True, **interleaved, **CUBE)
    yield cell("tied-interleaved-stages-2-1-3", tied=True, layers=6, pp_size=3, stage_replicas=[2, 1, 3], **interleaved)
    zb_v = dict(schedule="zb-v", virtual_stages=2)
    yield cell("tied-zb-v-cube", tied=True, **zb_v, **CUBE)
    yield cell("tied-zb-v-stages-3-1-2-gpt2", tied=True, architecture="gpt2", layers=6, **STAGES_3_1_2, **zb_v)
    yield cell("tied-recompute-full-cube", tied=True, recompute="full", **CUBE)
    yield cell("tied-cube-dropout", tied=True, drop=0.2, micro=2, **CUBE)
    yield cell("tied-cube-bf16", tied=True, policy="bf16", **CUBE)
    yield cell("tied-stages-1-3-without-backups", tied=True, backups=0, pp_size=2, stage_replicas=[1, 3])
    yield cell("gloo-tied-pp2-dp2", tied=True, transport="gloo", pp_size=2, dp_size=2)
    yield cell("gloo-tied-stages-1-2-zb-h1", tied=True, transport="gloo", **STAGES_1_2, schedule="zb-h1")
    yield cell("gloo-tied-stages-1-2-zero0", tied=True, transport="gloo", **STAGES_1_2, zero_stage=0)


LENGTHS = dict(kind="linear", start=8, duration=4)
"""8, 16, 24, 32 tokens."""
SIZES_OF_STEPS = dict(start=2, duration=4)
"""3, 5, 6, 8 sequences."""


def warmup_cells() -> Iterator[Cell]:
    """Four steps, none like another: longer sequences, more of them, or both."""
    interleaved = dict(schedule="interleaved", virtual_stages=2)
    kinds = dict(
        lengths=dict(sequence_length=LENGTHS),
        recycled=dict(sequence_length=LENGTHS | dict(recycle=True)),
        sizes=dict(batch_size=SIZES_OF_STEPS),
        both=dict(sequence_length=LENGTHS, batch_size=SIZES_OF_STEPS),
    )
    for kind, name, layout in [
        ("lengths", "pp2", dict(pp_size=2)),
        ("lengths", "dp2-zero0", dict(dp_size=2, zero_stage=0)),
        ("lengths", "tp2-sp", dict(tp_size=2, sequence_parallel=True)),
        ("lengths", "cube", CUBE),
        ("lengths", "cube-dropout-recompute", dict(drop=0.2, recompute="full", **CUBE)),
        ("lengths", "cube-gpt2", dict(architecture="gpt2", **CUBE)),
        ("lengths", "cube-bf16_sr", dict(policy="bf16_sr", **CUBE)),
        ("recycled", "cube", CUBE),
        ("recycled", "stages-1-2-zb-h1", dict(schedule="zb-h1", **STAGES_1_2)),
        ("sizes", "pp2", dict(pp_size=2)),
        ("sizes", "dp2", dict(dp_size=2)),
        ("sizes", "cube", CUBE),
        ("sizes", "pp4-gpipe", dict(pp_size=4, schedule="gpipe")),
        ("sizes", "cube-interleaved-tied", dict(tied=True, **interleaved, **CUBE)),
        ("both", "cube-zb-h1", dict(schedule="zb-h1", **CUBE)),
        ("both", "cube-interleaved", dict(**interleaved, **CUBE)),
        ("both", "stages-1-2", STAGES_1_2),
        ("both", "gloo-cube", dict(transport="gloo", **CUBE)),
    ]:
        plain = cell(f"warmup-{kind}-{name}", **layout)
        batch = plain.changes["batch"] | dict(sequence_length=32)
        yield replace(plain, steps=4, changes=plain.changes | dict(batch=batch, warmup=kinds[kind]))


CELLS: list[Cell] = [
    *(layout_cell(number, row) for number in range(len(SIZES)) for row in range(3)),
    *(
        cell(
            f"stages-{'-'.join(map(str, counts))}-tp{tp}-{rule}",
            **dict(tp_size=tp, pp_size=len(counts), schedule=rule, stage_replicas=list(counts)),
        )
        for counts, tp in [((2, 1), 1), ((1, 2), 1), ((2, 1), 2), ((3, 1, 2), 1), ((1, 3, 2, 1), 1)]
        for rule in ("1f1b", "gpipe")
    ),
    *(cell(f"order-{order}", order=order, **CUBE) for order in ("pp_dp_tp", "dp_pp_tp")),
    *(
        cell(
            f"dropout-tp{tp}-pp{pp}-dp{dp}-micro{micro}{'-sp' * sp}",
            drop=0.2,
            micro=micro,
            tp_size=tp,
            pp_size=pp,
            dp_size=dp,
            sequence_parallel=sp,
        )
        for tp, pp, dp, micro in [(2, 2, 2, 1), (1, 2, 2, 2), (2, 1, 2, 4), (4, 2, 1, 2)]
        for sp in (False, True)
    ),
    *(
        cell(
            f"{policy}-tp{tp}-pp{pp}-dp{dp}",
            policy=policy,
            tp_size=tp,
            pp_size=pp,
            dp_size=dp,
            sequence_parallel=tp > 1,
        )
        for policy in ("fp32", "fp16", "bf16", "bf16_sr")
        for tp, pp, dp in [(1, 1, 4), (2, 2, 2), (1, 4, 2), (4, 1, 1)]
    ),
    Cell(
        name="bf16_sr-everywhere-cube",
        changes=dict(
            parallel=CUBE, precision=dict(policy="bf16_sr", stochastic_rounding=["update", "accumulation", "outputs"])
        ),
    ),
    *(cell(f"bf16_sr-tp4-kv{kv}", policy="bf16_sr", kv=kv, tp_size=4, sequence_parallel=True) for kv in (1, 2)),
    *(
        cell(f"backups{backups}-{name}", backups=backups, **layout)
        for backups in (0, 1)
        for name, layout in [
            ("dp2", dict(dp_size=2)),
            ("dp3-pp2", dict(dp_size=3, pp_size=2)),
            ("cube", CUBE),
            ("stages-3-1-2", STAGES_3_1_2),
        ]
    ),
    *(
        cell(f"zb-h1-{name}", schedule="zb-h1", **layout)
        for name, layout in [
            ("pp4", dict(pp_size=4)),
            ("pp2-dp2", dict(pp_size=2, dp_size=2)),
            ("cube", CUBE),
            ("stages-2-1", dict(pp_size=2, stage_replicas=[2, 1])),
            ("pp4-dropout", dict(pp_size=4, drop=0.2)),
            ("pp2-tp2-bf16", dict(pp_size=2, tp_size=2, policy="bf16")),
            ("pp2-tp2-bf16_sr", dict(pp_size=2, tp_size=2, policy="bf16_sr")),
        ]
    ),
    *(
        cell(f"gpt2-{name}", architecture="gpt2", **layout)
        for name, layout in [
            ("tp2", dict(tp_size=2)),
            ("tp4-sp", dict(tp_size=4, sequence_parallel=True)),
            ("pp4-zb-h1", dict(pp_size=4, schedule="zb-h1")),
            ("tp2-dp4-zero0-sp", dict(tp_size=2, dp_size=4, zero_stage=0, sequence_parallel=True)),
            ("cube", CUBE),
            ("cube-fp32", dict(policy="fp32", **CUBE)),
            ("tp2-pp2-dropout", dict(tp_size=2, pp_size=2, drop=0.2)),
            ("tp4-pp2-micro2-dropout-sp", dict(tp_size=4, pp_size=2, drop=0.2, micro=2, sequence_parallel=True)),
            ("cube-dropout", dict(drop=0.2, **CUBE)),
            ("stages-2-1-tp2", dict(tp_size=2, pp_size=2, stage_replicas=[2, 1])),
            ("pp2-interleaved-dropout", dict(pp_size=2, schedule="interleaved", virtual_stages=2, drop=0.2)),
            ("cube-recompute-full-dropout", dict(recompute="full", drop=0.2, **CUBE)),
            ("cube-bf16_sr", dict(policy="bf16_sr", **CUBE)),
        ]
    ),
    *(
        cell(f"copied-heads-{name}", **layout)
        for name, layout in [
            ("tp2-kv1", dict(tp_size=2, kv=1)),
            ("tp4-kv1-sp-zero0", dict(tp_size=4, kv=1, zero_stage=0, sequence_parallel=True)),
            ("tp4-kv2-pp2-sp", dict(tp_size=4, kv=2, pp_size=2, sequence_parallel=True)),
            ("tp4-kv2-dp2-no-backups", dict(tp_size=4, kv=2, dp_size=2, backups=0)),
            ("tp2-kv1-pp2-zb-h1", dict(tp_size=2, kv=1, pp_size=2, schedule="zb-h1")),
            ("tp4-kv2-recompute-selective-sp", dict(tp_size=4, kv=2, recompute="selective", sequence_parallel=True)),
            ("cube-kv1-gpt2-dropout", dict(kv=1, architecture="gpt2", drop=0.2, **CUBE)),
            ("tp4-kv2-dp2-fp32", dict(tp_size=4, kv=2, dp_size=2, policy="fp32")),
            ("tp4-kv1-dp2-bf16", dict(tp_size=4, kv=1, dp_size=2, policy="bf16")),
        ]
    ),
    *(
        cell(f"recompute-{mode}-{name}", recompute=mode, **layout)
        for name, layout in [
            ("one", dict(micro=2)),
            ("cube-dropout", dict(drop=0.2, **CUBE)),
            ("pp4-zb-h1-dropout", dict(pp_size=4, schedule="zb-h1", drop=0.2)),
            ("pp2-tp2-zb-h1", dict(pp_size=2, tp_size=2, schedule="zb-h1")),
            ("stages-2-1-tp2", dict(pp_size=2, tp_size=2, stage_replicas=[2, 1])),
            ("tp4-sp-bf16", dict(tp_size=4, sequence_parallel=True, policy="bf16")),
        ]
        for mode in ("selective", "full")
    ),
    *(
        cell(f"interleaved-{name}", schedule="interleaved", virtual_stages=chunks, layers=layers, **layout)
        for name, chunks, layers, layout in [
            ("pp2-v2", 2, 4, dict(pp_size=2)),
            ("pp2-v3", 3, 7, dict(pp_size=2, zero_stage=0)),
            ("pp4-v2", 2, 8, dict(pp_size=4, drop=0.2)),
            ("pp4-v3-by-hand", 3, 13, dict(pp_size=4, layers_per_stage=[1, 1, 1, 1, 1, 1, 1, 1, 2, 1, 1, 1])),
            ("pp2-v2-tp4", 2, 4, dict(pp_size=2, tp_size=4, sequence_parallel=True)),
            ("pp2-v3-dp2-micro2", 3, 6, dict(pp_size=2, dp_size=2, drop=0.2, micro=2)),
            ("pp4-v2-dp2", 2, 8, dict(pp_size=4, dp_size=2, zero_stage=0)),
            ("cube-v2", 2, 4, dict(drop=0.2, **CUBE)),
            ("cube-v3-zero0", 3, 6, dict(zero_stage=0, **CUBE)),
            ("stages-2-1-v2", 2, 4, dict(pp_size=2, stage_replicas=[2, 1])),
            ("stages-2-1-3-v2", 2, 6, dict(pp_size=3, stage_replicas=[2, 1, 3])),
            ("pp3-v2-one-slot", 2, 6, dict(pp_size=3, p2p_slots=1)),
            ("pp2-v2-tp2-bf16", 2, 4, dict(pp_size=2, tp_size=2, policy="bf16")),
            ("pp2-v2-tp2-gpt2", 2, 4, dict(pp_size=2, tp_size=2, architecture="gpt2", drop=0.2)),
            ("pp2-v2-dp2-recompute", 2, 4, dict(pp_size=2, dp_size=2, recompute="full", drop=0.2)),
            ("stages-1-2-v2-recompute", 2, 4, dict(pp_size=2, stage_replicas=[1, 2], recompute="selective")),
        ]
    ),
    *(
        cell(f"zb-v-{name}", schedule="zb-v", virtual_stages=2, layers=layers, **layout)
        for name, layers, layout in [
            ("pp2", 4, dict(pp_size=2)),
            ("pp3-dp2-dropout", 6, dict(pp_size=3, dp_size=2, drop=0.2)),
            ("pp4-dp2-zero0", 8, dict(pp_size=4, dp_size=2, zero_stage=0)),
            ("cube", 4, dict(drop=0.2, **CUBE)),
            ("stages-1-2-micro2", 4, dict(micro=2, **STAGES_1_2)),
            ("stages-3-1-2", 6, STAGES_3_1_2),
            ("pp2-tp2-bf16", 4, dict(pp_size=2, tp_size=2, policy="bf16")),
            ("pp2-dp2-gpt2-recompute", 4, dict(pp_size=2, dp_size=2, architecture="gpt2", recompute="full")),
            ("pp2-tp2-documents", 4, dict(pp_size=2, tp_size=2, documents=True)),
        ]
    ),
    *(
        cell(f"documents-{name}", documents=True, **layout)
        for name, layout in [
            ("one", dict(micro=4)),
            ("cube", CUBE),
            ("cube-gpt2", dict(architecture="gpt2", **CUBE)),
            ("tp4-sp-kv1", dict(tp_size=4, kv=1, sequence_parallel=True)),
            (
                "tp4-pp2-gpt2-micro2-sp",
                dict(tp_size=4, pp_size=2, architecture="gpt2", micro=2, sequence_parallel=True),
            ),
            ("pp4-zb-h1-gpt2", dict(pp_size=4, schedule="zb-h1", architecture="gpt2")),
            ("pp2-v2-dp2-micro2", dict(pp_size=2, dp_size=2, schedule="interleaved", virtual_stages=2, micro=2)),
            ("stages-2-1-3-one-slot", dict(pp_size=3, stage_replicas=[2, 1, 3], p2p_slots=1)),
            ("cube-recompute-full-dropout", dict(recompute="full", drop=0.2, **CUBE)),
            ("pp2-recompute-selective-zb-h1", dict(pp_size=2, recompute="selective", schedule="zb-h1")),
            ("tied-cube", dict(tied=True, **CUBE)),
            ("pp2-tp2-fp32", dict(pp_size=2, tp_size=2, policy="fp32")),
            ("pp2-tp2-bf16", dict(pp_size=2, tp_size=2, policy="bf16")),
            ("pp2-tp2-fp16", dict(pp_size=2, tp_size=2, policy="fp16")),
        ]
    ),
    *tied_cells(),
    *(
        Cell(name=f"blend-{name}", changes=dict(parallel=parallel, data=dict(blend=blend_from(12 * 16))))
        for name, parallel in [("dp2", dict(dp_size=2)), ("cube", CUBE)]
    ),
    *warmup_cells(),
    cell("one-big-bucket", dp_size=4, bucket_mib=100.0),
    cell("many-small-buckets", dp_size=4, bucket_mib=0.001),
    cell("gloo-tp2", transport="gloo", tp_size=2),
    cell("gloo-tp2-sp", transport="gloo", tp_size=2, sequence_parallel=True),
    cell("gloo-tp4-sp", transport="gloo", tp_size=4, sequence_parallel=True),
    cell("gloo-pp2", transport="gloo", pp_size=2),
    cell("gloo-pp4-gpipe", transport="gloo", pp_size=4, schedule="gpipe"),
    cell("gloo-dp2", transport="gloo", dp_size=2),
    cell("gloo-dp4-zero0", transport="gloo", dp_size=4, zero_stage=0),
    cell("gloo-pp2-dp2", transport="gloo", pp_size=2, dp_size=2),
    cell("gloo-tp2-dp2-sp", transport="gloo", tp_size=2, dp_size=2, sequence_parallel=True),
    cell("gloo-pp2-dp2-without-backups", transport="gloo", backups=0, pp_size=2, dp_size=2),
    cell("gloo-pp2-dp2-zb-h1", transport="gloo", schedule="zb-h1", pp_size=2, dp_size=2),
    cell("gloo-cube-recompute-full", transport="gloo", recompute="full", **CUBE),
    cell("gloo-tp2-dp2-recompute-selective", transport="gloo", recompute="selective", tp_size=2, dp_size=2),
    cell("gloo-pp2-dp2-interleaved", transport="gloo", schedule="interleaved", virtual_stages=2, pp_size=2, dp_size=2),
    cell("gloo-tp2-pp2-dropout", transport="gloo", drop=0.2, tp_size=2, pp_size=2),
    cell("gloo-stages-2-1", transport="gloo", pp_size=2, stage_replicas=[2, 1]),
    cell("gloo-zb-v-pp2-dp2", transport="gloo", pp_size=2, dp_size=2, schedule="zb-v", virtual_stages=2),
    cell("gloo-cube", transport="gloo", order="dp_pp_tp", **CUBE),
    cell("gloo-cube-gpt2", transport="gloo", architecture="gpt2", drop=0.2, **CUBE),
    cell("gloo-tp4-dp2-kv2-sp", transport="gloo", tp_size=4, dp_size=2, kv=2, sequence_parallel=True),
    cell("gloo-cube-documents", transport="gloo", documents=True, architecture="gpt2", **CUBE),
    cell("gloo-cube-fp32", transport="gloo", policy="fp32", **CUBE),
    cell("gloo-tp2-dp2-bf16", transport="gloo", policy="bf16", tp_size=2, dp_size=2, sequence_parallel=True),
    cell("gloo-tp2-pp2-fp16", transport="gloo", policy="fp16", tp_size=2, pp_size=2, sequence_parallel=True),
    cell("gloo-tp2-dp2-bf16_sr", transport="gloo", policy="bf16_sr", tp_size=2, dp_size=2, sequence_parallel=True),
    Cell(
        name="gloo-cube-fifty-steps",
        transport="gloo",
        steps=50,
        loss_tolerance=1e-4,
        changes=dict(
            parallel=CUBE,
            precision=dict(policy="fp32"),
            optimizer=dict(learning_rate=3e-3, max_grad_norm=1.0),
            run=dict(num_steps=50),
        ),
    ),
]
