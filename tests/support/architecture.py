"""The rules of the tree as data, and their checkers: floors, kinds, globals, the environment, waits, grids, length.

Every checker takes the path of a file in the repository and its source, and yields what is wrong with it, so that the
checkers can be tested on bad snippets (test_architecture_checkers.py).

Floors: a file imports only from lower floors and from its own folder; only commands import `parallel3d.models`, and the
scripts under launch/ only import commands.
Kinds: pure files never import torch, nor a file that is not pure; tensor files never import torch.distributed.

`python -m tests.support.architecture` writes the table of floors into docs/architecture.md.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tests.support.grid_reads import check_grid_reads
from tests.support.host_reads import check_host_reads
from tests.support.imports import folder_of, imports, is_in, module_of, project_imports, type_checking_lines
from tests.support.waits import check_waits

ROOT = Path(__file__).parents[2]
MAX_LINES = 400
MAX_FUNCTION_LINES = 50

FLOORS: dict[str, int] = {
    "parallel3d.remote_address": -4,  # what messages of errors leave out of addresses
    "parallel3d.errors": -3,  # below all others, which raise them
    "parallel3d.user_code": -2,  # the rows below find those of installed packages by it
    "parallel3d.config.sections.section": -2,  # pydantic's base class, for the rows' own fields
    "parallel3d.size_schedule": -1,  # the configuration builds them
    "parallel3d.number_formats": -1,  # precision policies refer to them
    "parallel3d.families": -1,  # rows that the configuration reads
    "parallel3d.parallel.abort": 0,  # needs errors alone; the other files of floor 1 wait with it
    "parallel3d.decay_shapes": -1,  # the configuration takes names from it
    "parallel3d.ramps": 0,
    "parallel3d.backends": 0,
    "parallel3d.child_process": 0,
    "parallel3d.usable_cores": 0,
    "parallel3d.handshake": 0,
    "parallel3d.rejections": 0,
    "parallel3d.keepalive": 0,
    "parallel3d.lasting_output": 0,
    "parallel3d.compiled_loops": -1,  # random_keys calls them
    "parallel3d.random_keys": 0,
    "parallel3d.accelerator": 0,
    "parallel3d.pipeline.schedules": -1,  # the configuration takes names, limits and messages from them
    "parallel3d.pipeline.chunk_layout": -1,
    "parallel3d.optim.update_rules": -1,  # the configuration takes names, settings and states from them
    "parallel3d.config": 0,
    "parallel3d.goodput": 1,
    "parallel3d.remote_files": 1,
    "parallel3d.parallel": 1,
    "parallel3d.precision": 1,
    "parallel3d.kernels": 2,
    "parallel3d.layers": 3,
    "parallel3d.recompute": 3,
    "parallel3d.data": 3,
    "parallel3d.models": 4,
    "parallel3d.decoding": 4,
    "parallel3d.pipeline": 5,
    "parallel3d.optim": 6,
    "parallel3d.checkpoint": 7,
    "parallel3d.debug": 7,
    "parallel3d.monitor": 7,
    "parallel3d.studies": 8,
    "parallel3d.elastic": 8,
    "parallel3d.trainer": 9,
    "parallel3d.comparison": 10,
    "parallel3d.rehearsal": 10,
    "parallel3d.report_page": 11,  # plans the pipeline that it draws, and shows what evaluations have found
    "parallel3d.worker": 10,
    "parallel3d.doctor": 10,
    "parallel3d.evaluation": 10,
    "parallel3d.door": 11,
    "parallel3d.costs.rental": 1,  # arithmetic alone; pages of runs show what they have cost
    "parallel3d.costs": 11,
    "parallel3d.inprocess": 11,
    "parallel3d.inprocess.live_bytes": 6,  # needs torch alone
    "parallel3d.models.hf_export": 11,
    "parallel3d.models.hf_import": 11,
    "parallel3d.models.initial_weights": 11,
    "parallel3d.models.plain_export": 11,
    "parallel3d.models.weight_files": 11,
    "parallel3d.__version__": 11,  # only commands name it
    "parallel3d.commands": 12,
    "parallel3d.__main__": 13,
    "launch": 13,
}
"""Floor of a module or of all modules in a package; the longest name that fits counts."""

PURE: tuple[str, ...] = (
    "parallel3d.remote_address",
    "parallel3d.errors",
    "parallel3d.user_code",
    "parallel3d.decay_shapes",
    "parallel3d.ramps",
    "parallel3d.size_schedule",
    "parallel3d.backends",
    "parallel3d.number_formats",
    "parallel3d.families",
    "parallel3d.config",
    "parallel3d.goodput",
    *(f"parallel3d.parallel.{name}" for name in ("grid", "sharding", "tree_place")),
    "parallel3d.precision.fixed_point",
    "parallel3d.precision.loss_scale",
    *(
        f"parallel3d.pipeline.{name}"
        for name in ("instructions", "partition", "request", "routes", "simulator", "planner", "check", "timeline")
    ),
    *(f"parallel3d.pipeline.{name}" for name in ("chunk_layout", "schedules", "component_tables", "mailboxes")),
    *(f"parallel3d.pipeline.{name}" for name in ("route_map", "wide_simulator", "time_bounds")),
    *(f"parallel3d.pipeline.{name}" for name in ("slow_replicas", "slow_plan")),
    "parallel3d.layers.micro_batch",
    "parallel3d.data.reader",
    "parallel3d.decoding.texts",
    *(f"parallel3d.optim.{name}" for name in ("bucket_plan", "shard_map", "state_norms", "update_rules")),
    *(f"parallel3d.checkpoint.{name}" for name in ("tensor_chunks", "index")),
    *(
        f"parallel3d.monitor.{name}"
        for name in ("loss_ratio", "spikes", "divergence", "training_monitor", "correlation", "history", "uptime")
    ),
    *(
        f"parallel3d.monitor.{name}"
        for name in ("flops", "evaluation_interval", "tuning", "upload_history", "saved_notice", "paid_time")
    ),
    *(
        f"parallel3d.report_page.{name}"
        for name in ("page_data", "page_chart", "page_events", "page_results", "scales", "watched_run", "terminal_view")
    ),
    *(f"parallel3d.report_page.{name}" for name in ("timeline_chart", "repeat_commands")),
    "parallel3d.debug.replica_check",
    *(
        f"parallel3d.elastic.protocol.{name}"
        for name in (
            "actions",
            "membership",
            "survivability",
            "failover",
            "state_machine",
            "restart_policy",
            "probe_graph",
            "vacancies",
            "newest_report",
            "worker_table",
        )
    ),
    "parallel3d.elastic.hang_report",
    "parallel3d.elastic.frame_schemas",
    "parallel3d.elastic.drain_target",
    *(f"parallel3d.rehearsal.{name}" for name in ("kernel_counts", "device_rows", "roofline")),
    *(f"parallel3d.rehearsal.{name}" for name in ("ideal_counts", "estimate_table")),
    *(f"parallel3d.elastic.coordinator.{name}" for name in ("recovery_log", "drains", "preemptions")),
    *(f"parallel3d.elastic.drop_in.{name}" for name in ("sample_order", "progress")),
    *(f"parallel3d.elastic.guardian.{name}" for name in ("launcher_env", "slurm", "rejoin_schedule")),
    *(
        f"parallel3d.trainer.{name}"
        for name in (
            "learning_rate",
            "entry",
            "entry_layout",
            "lane_cursors",
            "state",
            "seen_steps",
            "batching",
            "plans",
            "hopeless_replicas",
            "divergence_check",
            "message_sizes",
        )
    ),
    "parallel3d.costs",
    "parallel3d.studies",
    "parallel3d.evaluation.rows",
    "parallel3d.evaluation.results",
    "parallel3d.evaluation.result_figures",
)
NAMES_TENSORS: tuple[str, ...] = ("parallel3d.optim.update_rules",)
"""Pure files whose functions take tensors: they name torch's types under TYPE_CHECKING, and import nothing of it."""
TENSORS_ONLY: tuple[str, ...] = (
    "parallel3d.accelerator",
    "parallel3d.random_keys",
    "parallel3d.recompute",
    "parallel3d.precision",
    "parallel3d.kernels",
)

MAY_IMPORT_MODELS: tuple[str, ...] = ("parallel3d.models", "parallel3d.commands")

MAY_READ_ENVIRONMENT: tuple[str, ...] = (
    "parallel3d/commands/",
    "parallel3d/door/",
    "parallel3d/elastic/guardian/launcher_env.py",
    "parallel3d/elastic/drop_in/launch_script.py",
    "parallel3d/worker/device.py",
    "parallel3d/data/hf_loader.py",  # its library's threads have no other switch
    "parallel3d/data/remote.py",  # signatures, which a configuration must not hold
)

Checker = Callable[[str, str], Iterator[str]]


def check_floors(path: str, source: str) -> Iterator[str]:
    """Imports that lead up, or sideways into another folder."""
    module = module_of(path)
    if module == "parallel3d" and path.endswith("__init__.py"):
        floor = min(FLOORS.values())  # the root imports nothing: importing any part loads only that part
    elif (found := floor_of(module)) is None:
        yield f"{path}: has no floor, add it to FLOORS"
        return
    else:
        floor = found
    only_types = type_checking_lines(source) if module == "parallel3d" else set()  # its names are imported when used
    for line, imported in project_imports(path, source):
        other = floor_of(imported)
        if line in only_types:
            continue
        if is_in(imported, ("parallel3d.models",)) and not is_in(module, MAY_IMPORT_MODELS):
            yield f"{path}:{line}: the framework imports {imported}: commands pass models to it"
        elif module.startswith("launch") and not is_in(imported, ("parallel3d.commands",)):
            yield f"{path}:{line}: a script imports {imported}, which is not a command"
        elif other is None:
            yield f"{path}:{line}: imports {imported}, which has no floor"
        elif other >= floor and folder_of(imported) != folder_of(module):
            yield f"{path}:{line}: floor {floor} imports {imported} of floor {other}"


def check_kinds(path: str, source: str) -> Iterator[str]:
    """torch in pure files, torch.distributed in tensor files."""
    module = module_of(path)
    pure, tensors_only = is_in(module, PURE), is_in(module, TENSORS_ONLY)
    only_types = type_checking_lines(source) if is_in(module, NAMES_TENSORS) else set()
    for line, imported in imports(path, source):
        if pure and is_in(imported, ("torch",)) and line not in only_types:
            yield f"{path}:{line}: a pure file imports {imported}"
        if pure and is_in(imported, ("parallel3d",)) and not is_in(imported, PURE):
            yield f"{path}:{line}: a pure file imports {imported}, which is not pure"
        if tensors_only and is_in(imported, ("torch.distributed",)):
            yield f"{path}:{line}: a file for tensors alone imports {imported}"


def check_globals(path: str, source: str) -> Iterator[str]:
    """`global` statements."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Global):
            yield f"{path}:{node.lineno}: global {', '.join(node.names)}"


def check_environment(path: str, source: str) -> Iterator[str]:
    """Uses of os.environ and os.getenv where settings should come from the configuration."""
    if path.startswith(MAY_READ_ENVIRONMENT):
        return
    names = {"environ", "environb", "getenv", "getenvb"}
    for node in ast.walk(ast.parse(source)):
        is_attribute = isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os"
        is_import = isinstance(node, ast.ImportFrom) and node.module == "os" and {a.name for a in node.names} & names
        if is_attribute or is_import:
            yield f"{path}:{node.lineno}: {ast.unparse(node)}"


def check_docstring(path: str, source: str) -> Iterator[str]:
    """Files that do not say what they are."""
    if source.strip() and not ast.get_docstring(ast.parse(source)):  # an empty __init__ says nothing
        yield f"{path}: has no docstring"


def check_length(path: str, source: str) -> Iterator[str]:
    """Files and functions too long to be read in one go."""
    if (num_lines := len(source.splitlines())) > MAX_LINES:
        yield f"{path}: {num_lines} lines, more than {MAX_LINES}"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                yield f"{path}:{node.lineno}: {node.name} has {num_lines} lines, more than {MAX_FUNCTION_LINES}"


CHECKERS: tuple[Checker, ...] = (
    check_floors,
    check_kinds,
    check_globals,
    check_environment,
    check_waits,
    check_host_reads,
    check_grid_reads,
    check_docstring,
    check_length,
)


def floor_of(module: str) -> int | None:
    parts = module.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((FLOORS[prefix] for prefix in prefixes if prefix in FLOORS), None)


# --- the documentation ------------------------------------------------------------------------------------------------


def floor_table() -> str:
    """FLOORS and PURE as a table for docs/architecture.md, lowest floor first."""
    rows = ["| floor | modules | pure among them |", "|---|---|---|"]
    for floor in sorted(set(FLOORS.values())):
        modules = [module for module in FLOORS if FLOORS[module] == floor]
        pure = [module for module in PURE if floor_of(module) == floor]
        rows.append(f"| {floor} | {_short(modules)} | {_short(pure)} |")
    return "\n".join(rows)


def _short(modules: Iterable[str]) -> str:
    return ", ".join(f"`{module}`" for module in sorted(modules))


FLOORS_IN_DOCS = re.compile(r"(<!-- floors -->\n).*?(<!-- /floors -->)", re.DOTALL)


if __name__ == "__main__":  # writes the table of floors into the documentation
    page = ROOT / "docs" / "architecture.md"
    page.write_text(FLOORS_IN_DOCS.sub(lambda found: f"{found[1]}{floor_table()}\n{found[2]}", page.read_text()))
