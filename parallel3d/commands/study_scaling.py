"""`study scaling`: the cost of tokens over the number of hosts, from runs and from estimates (HLAT, section IV)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import ceil

from parallel3d.commands.study_runs import StudyRunner, print_line, read_run_folder
from parallel3d.config.derived import world_size
from parallel3d.config.load import load_config, resolve
from parallel3d.config.schema import Config
from parallel3d.costs.layered_parameters import LayeredParameters
from parallel3d.costs.layout_estimate import estimate_layout
from parallel3d.costs.layout_search import find_obstacle, on_machines, rank_layouts
from parallel3d.costs.machines import Machines, parse_machines
from parallel3d.costs.rental import FLAT, ScalingRow, scaling_report
from parallel3d.errors import UserError
from parallel3d.models.make import shardings_of
from parallel3d.rehearsal.device_rows import GIB
from parallel3d.studies.text_table import draw_columns, number

NO_MEMORY = "no memory"
NO_ROOM = "out of memory"


@dataclass(frozen=True, kw_only=True)
class ScalingSeries:
    """One model on several numbers of equal hosts."""

    title: str
    price_of_host: float | None
    """Dollars an hour; None: unknown, and costs are in hours of a host."""
    speeds: Mapping[int, float | None]
    """Tokens/s by number of hosts; None: it can't run on them."""
    reasons: Mapping[int, str] = field(default_factory=dict)
    """Why not, by number of hosts; it does not fit into memory where none is given."""

    @property
    def rows(self) -> list[ScalingRow]:
        return scaling_report(self.speeds, 1.0 if self.price_of_host is None else self.price_of_host)


def study_scaling(options: argparse.Namespace) -> int:
    """Prints a table for the runs, and one for each kind of device. Returns the exit code."""
    series = list(_measured(options)) + list(_estimated(options))
    if not series:
        raise UserError("study scaling needs run folders, or --config FILE with --devices 8xH100-80GB:1,8xH100-80GB:2")
    result = {"kind": "scaling", "series": [asdict(each) | {"rows": list(map(asdict, each.rows))} for each in series]}
    if options.out:
        StudyRunner(options.out, num_runs=0).write_result(result)
    print_line(json.dumps(result, indent=2) if options.json else "\n".join(_describe(series)).rstrip())
    return 0


def _measured(options: argparse.Namespace) -> Iterator[ScalingSeries]:
    """The series of the runs; nothing without any."""
    speeds: dict[int, float | None] = {}
    for folder in options.runs:
        run, raw = read_run_folder(folder)
        config = Config.model_validate(raw)
        ranks = world_size(config)
        hosts = ceil(ranks / options.ranks_per_host) if options.ranks_per_host else 1
        if hosts in speeds:
            raise UserError(
                f"{folder}: a second run on {hosts} host{'s' if hosts > 1 else ''} ({ranks} ranks); give one run for"
                " each number of hosts, and --ranks-per-host N where a run has more ranks than a host"
            )
        if run.ended not in ("", NO_MEMORY):
            raise UserError(f"{folder} did not reach its end ({run.ended}): give a run that did, or ran out of memory")
        per_step = run.tokens / len(run.losses) if run.losses else 0.0
        speeds[hosts] = per_step / run.step_s if run.step_s and not run.ended else None
    if speeds:
        yield ScalingSeries(title="measured", price_of_host=options.dollars_per_hour, speeds=speeds)


def _estimated(options: argparse.Namespace) -> Iterator[ScalingSeries]:
    """A series for each kind of host among --devices."""
    if bool(options.config) != bool(options.devices):
        raise UserError("estimates need both --config FILE and --devices LIST")
    if not options.config:
        return
    config = resolve(load_config(options.config, options.set), config_path=options.config)
    parts = LayeredParameters.of(shardings_of(config.model), config.model.num_hidden_layers)
    kinds: dict[str, list[Machines]] = {}
    for machines in parse_machines(options.devices, options.device_table):
        kinds.setdefault(f"{machines.devices_per_host}x{machines.device.name}", []).append(machines)
    for name, sizes in kinds.items():
        found = {each.num_hosts: predict_speed(config, parts, each, is_searched=options.search) for each in sizes}
        price = sizes[0].device.price_per_hour
        yield ScalingSeries(
            title=f"{name} (predicted)",
            price_of_host=options.dollars_per_hour or (None if price is None else price * sizes[0].devices_per_host),
            speeds={hosts: speed for hosts, (speed, _) in found.items()},
            reasons={hosts: reason for hosts, (_, reason) in found.items() if reason},
        )


def predict_speed(
    config: Config, parts: LayeredParameters, machines: Machines, *, is_searched: bool
) -> tuple[float | None, str]:
    """Tokens/s of the configuration's layout, or of the best one; or None and why it can't run."""
    limit = f"of {machines.device.memory_gib:g} GiB"
    if is_searched:
        ranked = rank_layouts(config, parts, machines)
        if ranked.estimates:
            return ranked.estimates[0].tokens_per_s, ""
        if ranked.too_large:
            return None, f"{NO_ROOM}: a rank needs {min(ranked.too_large.values()):.1f} {limit}"
        return None, "no layout uses all devices"
    if obstacle := find_obstacle(config, machines.num_devices):
        return None, obstacle.why
    estimate = estimate_layout(on_machines(config, machines), parts, machines)
    if not estimate.fits:
        return None, f"{NO_ROOM}: a rank needs {estimate.worst.total / GIB:.1f} {limit}"
    return estimate.tokens_per_s, ""


def _describe(series: Sequence[ScalingSeries]) -> Iterator[str]:
    for each in series:
        unit = "$" if each.price_of_host is not None else "host-hours"
        rows = [["hosts", "tokens/s", f"{unit} for 4M tokens", f"{unit} for 1T tokens", "of the least"]]
        for row in each.rows:
            cost = None if row.cost is None else row.cost / 4e6 * 1e12
            reason = each.reasons.get(row.num_hosts, NO_ROOM)
            relative = reason if row.relative is None else f"{row.relative:.2f}"
            speed = number(each.speeds[row.num_hosts], ",.0f")
            rows.append([str(row.num_hosts), speed, number(row.cost, ".4g"), number(cost, ",.0f"), relative])
        yield f"{each.title}:"
        yield from draw_columns(rows, left=(0, len(rows[0]) - 1))
        yield _verdict(each.rows)
        yield ""


def _verdict(rows: Sequence[ScalingRow]) -> str:
    """Whether the cost of a token is flat."""
    known = [row for row in rows if row.relative is not None]
    if not known:
        return "it runs on none of these numbers of hosts"
    if len(known) < 2:
        return "one number of hosts that fits shows no scaling"
    if all(row.is_flat for row in known):
        return f"flat: a token costs at most {max(row.relative or 0 for row in known):.2f} times the least"
    first = next(row for row in known if not row.is_flat)
    size = f"{first.relative:.2f} times the least (flat is up to {FLAT:g})"
    return f"not flat: on {first.num_hosts} host{'s' if first.num_hosts > 1 else ''} a token costs {size}"
