"""Shows what one iteration will do: `python launch/plan.py --config FILE [section.field=value ...] [--png FILE]`.

Prints the grid, the layers and costs of each stage, the routes that leave their home replica, the bubble, the memory of
the pipeline, and the timeline of the instruction lists that training executes, which the checker has proven. `--lost
3,5` shows the iteration after the loss of these ranks at once, all on one host. Where stages differ in their numbers of
replicas, it prints all candidates. `--device H200` also predicts speed and memory on such a GPU (parallel3d/rehearsal),
for models on one stage. `--devices 8xH100-80GB:16` estimates memory, time and money on such hosts instead, `--search`
ranks all layouts on them (parallel3d/costs, docs/planning.md). Exit codes: 0 done, 2 invalid input.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from parallel3d.commands.parsers import parse
from parallel3d.config.derived import batch_sizes, tokens_per_step
from parallel3d.config.load import load_config, resolve
from parallel3d.config.schema import Config
from parallel3d.config.specs.policies import POLICY_SPECS
from parallel3d.config.warmup_builder import describe_warmup, length_warmup, run_length
from parallel3d.costs.cost_report import describe_costs, describe_search
from parallel3d.costs.layered_parameters import LayeredParameters
from parallel3d.costs.machines import parse_machines
from parallel3d.elastic.control_estimate import estimate_control
from parallel3d.elastic.protocol.survivability import check_survivability
from parallel3d.elastic.protocol.vacancies import GridTarget, fill
from parallel3d.errors import UserError
from parallel3d.models.make import make_stage, shardings_of
from parallel3d.parallel.grid import Grid, ReplicaId
from parallel3d.pipeline.check import CheckReport, check_plan
from parallel3d.pipeline.partition import stage_costs
from parallel3d.pipeline.planner import Plan, complete_candidates
from parallel3d.pipeline.timeline import draw_png, draw_text
from parallel3d.rehearsal.config_estimate import describe_config
from parallel3d.rehearsal.device_rows import find_rows
from parallel3d.trainer.message_sizes import estimate_message_sizes
from parallel3d.trainer.plans import build_grid, costs_of, plan_schedule, split_layers

MAX_ROUTES = 16


def main(arguments: list[str]) -> int:
    options = parse("plan", arguments)
    try:
        config = resolve(load_config(options.config, options.overrides), config_path=options.config)
        if options.devices is not None:
            print("\n".join(describe_devices(config, options)).rstrip())
            return 0
        if options.search or options.policies or options.price or options.tokens:
            raise UserError("--search, --policies, --price and --tokens need --devices, as in --devices 8xH100-80GB:16")
        print("\n".join(describe(config, parse_ranks(options.lost), options.png)))
        if options.device is not None:
            print("\n".join(describe_speed(config, options.device, options.rows)))
        if options.workers is not None:
            print("\n".join(describe_control(config, options.workers)))
        return 0
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def parse_ranks(text: str) -> tuple[int, ...]:
    """The ranks of a list like 3,5."""
    try:
        return tuple(sorted({int(rank) for rank in text.split(",")})) if text else ()
    except ValueError:
        raise UserError(f"--lost {text}: give the numbers of ranks, as in --lost 3,5") from None


def describe(config: Config, lost: tuple[int, ...], png: Path | None) -> Iterator[str]:
    """The report, line by line; writes the picture if one is asked for."""
    num_micro_batches = config.batch.num_micro_batches
    assert num_micro_batches is not None
    whole = build_grid(config)
    grid = remove_ranks(config, whole, lost)
    partition = split_layers(config)
    plan = complete_candidates(plan_schedule(config, grid, num_micro_batches))
    report = check_plan(plan, config.parallel.p2p_slots, estimate_message_sizes(config, partition))
    yield from describe_grid(config, grid)
    yield from describe_lost_ranks(whole, grid, lost)
    yield from describe_warmup(config)
    yield ""
    yield from describe_stages(config, partition, plan, report)
    yield ""
    yield from describe_candidates(plan)
    yield from describe_routes(plan)
    yield f"{plan.reason}; bubble {plan.bubble:.1%}"
    yield draw_text(plan, width=shutil.get_terminal_size((120, 40)).columns)
    yield describe_marks(plan)
    if png is not None:
        gone = [replica for stage in range(whole.pp_size) for replica in lost_replicas(whole, grid, stage)]
        write_png(plan, png, gone)
        yield f"wrote {png}"


def describe_speed(config: Config, names: str, rows: Path | None) -> Iterator[str]:
    """Yields the prediction for each named device: a step of one replica, rehearsed on meta tensors."""
    yield ""
    yield "one replica on a GPU, as if it kept all of its optimizer state:"
    yield from describe_config(config, make_stage, find_rows(names, rows))


def describe_devices(config: Config, options: argparse.Namespace) -> Iterator[str]:
    """Yields what training costs on the devices that are named, or the ranking of all layouts there."""
    machines = parse_machines(options.devices, options.rows, options.price)
    num_tokens = tokens_of_run(config) if options.tokens is None else options.tokens
    if config.parallel.stage_replicas is not None and not options.search:
        raise UserError("parallel.stage_replicas: the estimate needs equally many replicas of each stage: use dp_size")
    policies = options.policies.split(",") if options.policies else ()
    if unknown := [name for name in policies if name not in POLICY_SPECS]:
        raise UserError(f"--policies {', '.join(unknown)}: there are {', '.join(POLICY_SPECS)}")
    parts = LayeredParameters.of(shardings_of(config.model), config.model.num_hidden_layers)
    if options.search:
        return describe_search(config, parts, machines, num_tokens, policies)
    return describe_costs(config, parts, machines, num_tokens)


def tokens_of_run(config: Config) -> int:
    """Tokens that the run trains on, its warmups' shorter steps included; no function of the user's is called."""
    if length_warmup(config).kind == "custom":
        return config.run.num_tokens or tokens_per_step(config) * (config.run.num_steps or 1)
    return run_length(config).num_tokens


def describe_control(config: Config, num_workers: int) -> Iterator[str]:
    """Yields the coordinator's costs with `num_workers`, at this configuration's global batch."""
    if num_workers < 1:
        raise UserError(f"--workers {num_workers}: must be at least 1")
    _, micro_batch_size, num_micro_batches = batch_sizes(config.batch)
    num_sequences = num_micro_batches * micro_batch_size
    yield ""
    yield f"the coordinator of {num_workers:,} workers, {num_sequences:,} sequences a step (estimated):"
    for workers, guardians, when in (
        (8, 1, "a guardian for 8 workers"),
        (1, 8, "one for each, as under torchrun, through relays of hosts of 8"),
        (1, 1, "one for each, without relays"),
    ):
        estimate = estimate_control(
            num_workers,
            num_sequences=num_sequences,
            tp_size=config.parallel.tp_size,
            pp_size=config.parallel.pp_size,
            workers_per_guardian=workers,
            guardians_per_connection=guardians,
        )
        yield f"  {when}: {estimate}"


def remove_ranks(config: Config, whole: Grid, lost: tuple[int, ...]) -> Grid:
    """The grid on which a run goes on after the loss, as its membership protocol decides."""
    if unknown := [rank for rank in lost if not whole.holds(rank)]:
        raise UserError(f"--lost {list_numbers(unknown)}: the ranks are 0 to {whole.ranks[-1]}")
    if lost and not config.elastic.enabled:
        why = "elastic.enabled is false, so the first loss ends the run. Set it to true to plan for losses"
        raise UserError(f"--lost {list_numbers(lost)}: training would end there: {why}")
    left, spares = whole.without(lost)
    grid = fill(
        left,
        target=GridTarget.of(whole),
        candidates={rank: whole.part(rank) for rank in spares},
        hosts={},
        holders=whole,
    )
    survivability = check_survivability(
        whole,
        zero_stage=config.parallel.zero_stage,
        zero_backups=config.elastic.zero_backups,
        hosts={},
        dead=lost,
        next_grid=grid,
    )
    if not survivability.can_continue:
        raise UserError(
            f"--lost {list_numbers(lost)}: training would end there: {survivability.reason}. "
            "Lose fewer ranks, or raise parallel.dp_size"
        )
    return grid


def lost_replicas(whole: Grid, grid: Grid, stage: int) -> list[ReplicaId]:
    """The replicas of a stage that `whole` has and `grid` lacks."""
    return [(stage, replica) for replica in whole.stages[stage] if replica not in grid.stages[stage]]


def list_numbers(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


def describe_grid(config: Config, grid: Grid) -> Iterator[str]:
    parallel, batch, replicas = config.parallel, config.batch, [len(stage) for stage in grid.stages]
    width = str(replicas[0]) if len(set(replicas)) == 1 else "/".join(map(str, replicas))
    yield f"{grid.pp_size} stages x {width} replicas x {grid.tp_size} tensor ranks = {len(grid.ranks)} ranks"
    yield (
        f"{batch.num_micro_batches} micro-batches of {batch.micro_batch_size} sequences of {batch.sequence_length} "
        f"tokens, {parallel.p2p_slots} slots a pair"
    )


def describe_lost_ranks(whole: Grid, grid: Grid, lost: tuple[int, ...]) -> Iterator[str]:
    """Yields lost ranks, ranks that move to another replica, and spares, with their first coordinates."""
    for rank in lost:
        yield f"rank {rank} ({whole.coordinates(rank)}): lost"
    for rank in whole.ranks:
        if grid.holds(rank) and grid.coordinates(rank) != whole.coordinates(rank):
            yield f"rank {rank} ({whole.coordinates(rank)}): now {grid.coordinates(rank)}"
        elif not grid.holds(rank) and rank not in lost:
            yield f"rank {rank} ({whole.coordinates(rank)}): spare, its replica is incomplete"


def describe_candidates(plan: Plan) -> Iterator[str]:
    """Yields every candidate with its makespan, the chosen one marked; nothing on a straight grid."""
    if not plan.candidates:
        return
    width = max(len(candidate.name) for candidate in plan.candidates)
    yield "candidates, in time units:"
    for candidate in plan.candidates:
        mark = ">" if candidate.request == plan.request else " "
        yield f"  {mark} {candidate.name:<{width}}  {candidate.makespan:>6}"
    yield ""


def describe_stages(config: Config, partition: tuple[range, ...], plan: Plan, report: CheckReport) -> Iterator[str]:
    """Yields a line per stage: layers, cost in layers, peaks of micro-batches (of one chunk each) and bytes held."""
    model = config.model
    costs = costs_of(config)
    by_chunk = stage_costs(partition, [costs.layer] * model.num_hidden_layers, costs.embedding, costs.head)
    rows = []
    for stage, virtual_stages in enumerate(plan.request.layout.virtual_stages):
        cost, chunks = sum(by_chunk[k] for k in virtual_stages), [partition[k] for k in virtual_stages]
        mine = [replica for replica in plan.lists if replica[0] == stage]
        held = max(report.peak_in_flight[replica] for replica in mine)
        num_bytes = max(report.peak_bytes[replica] for replica in mine)
        spans = " ".join(f"{layers.start}-{layers.stop - 1}" for layers in chunks)
        layers = f"{spans} ({sum(map(len, chunks))})"
        rows.append((stage, len(mine), layers, cost / costs.layer, held, num_bytes / 2**20))
    width = max(16, *(len(layers) for _, _, layers, *_ in rows))
    yield f"stage  replicas  {'layers':<{width}}  cost (layers)  in flight  peak activations and messages, per rank"
    for stage, count, layers, num_layers, held, mebibytes in rows:
        yield f"{stage:<5}  {count:<8}  {layers:<{width}}  {num_layers:<13.2f}  {held:<9}  {mebibytes:,.1f} MiB"
    head = costs.head / costs.layer
    recomputed = "" if config.parallel.recompute == "none" else " and what the layer at work recomputes"
    yield f"(the head costs {head:.2f} layers; bytes are an estimate and leave the head's logits{recomputed} out)"
    if plan.request.virtual_stages > 1:
        yield "(in flight counts a micro-batch once for each chunk that holds it)"


def describe_routes(plan: Plan) -> Iterator[str]:
    """Yields replicas without work and rerouted micro-batches; nothing on a straight grid."""
    if idle := [replica for replica, steps in plan.lists.items() if not steps]:
        yield f"without work (stage, replica): {', '.join(map(str, idle))}"
        yield ""
    rerouted = [(micro_batch, route) for micro_batch, route in enumerate(plan.routes) if len(set(route)) > 1]
    if not rerouted:
        return
    yield "rerouted micro-batches, replica by stage:"
    for micro_batch, route in rerouted[:MAX_ROUTES]:
        yield f"  {micro_batch:>4}: {' > '.join(map(str, route))}"
    if len(rerouted) > MAX_ROUTES:
        yield f"  and {len(rerouted) - MAX_ROUTES} more"
    yield ""


def describe_marks(plan: Plan) -> str:
    """Explains the marks of the timeline that this plan uses."""
    marks = ["3 is the forward of micro-batch 3", "3' its backward"]
    if plan.request.splits:
        marks[1:] = ["3' its gradients of inputs", '3" its gradients of weights']
    if plan.request.virtual_stages > 1:
        marks.append("3b micro-batch 3 in the stage's second chunk")
    return f"({', '.join([*marks, 'a dot idle time'])})"


def write_png(plan: Plan, path: Path, lost: Sequence[ReplicaId]) -> None:
    """Draws the plan into a file. Raises UserError if the file can't be written."""
    try:
        draw_png(plan, path, lost=lost)
    except (OSError, ValueError) as error:  # ValueError: a suffix that names no picture format
        raise UserError(f"--png {path}: the picture can't be written: {error}") from error
