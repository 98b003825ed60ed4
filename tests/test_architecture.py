"""The architecture, held by a test: floors, kinds, no globals, no stray environment reads, no wait without an end.

Every checker takes a file's place in the repository and its source and returns what is wrong with it, so that the
checkers can be tested on bad snippets (the second half of this file).

Floors: a file imports only from lower floors and from its own folder; `parallel3d` never imports `models` or `launch`.
Kinds: pure files never import torch, nor a file that is not pure; tensor files never import torch.distributed. Pure
files with formulas in methods of tensors may name torch's types under TYPE_CHECKING.
Waits: in a file that uses what blocks by itself (threads, sockets, processes, torch.distributed), a call that may block
has a timeout, or stands in a function that has an abort token, or says on one of its lines why it ends, as
`# bounded: <why>`. Other files wait for what those made: a group's work carries its group's token.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath

import pytest

from tests.support import english

ROOT = Path(__file__).parents[1]
MAX_LINES = 400
MAX_FUNCTION_LINES = 50
LONGER: dict[str, int] = {}
"""Files and functions that were longer when the limits came. Their limits only fall."""

UNWANTED_WORDING: dict[str, int] = {
    "parallel3d": 64,
    "models": 6,
    "launch": 2,
    "benchmarks": 15,
    "docs": 7,
    "README.md": 0,
}
"""Findings of tests/support/english.py that are left. The numbers only fall: lower them with your rewriting."""

FLOORS: dict[str, int] = {
    "parallel3d.errors": -2,  # below all others: everybody raises them
    "parallel3d.config.sections.section": -2,  # pydantic's base class, for the rows' own fields
    "parallel3d.size_schedule": -1,  # the configuration builds them
    "parallel3d.families": -1,  # rows that the configuration reads
    "parallel3d.parallel.abort": 0,  # needs errors alone; the other files of floor 1 wait with it
    "parallel3d.ramps": 0,
    "parallel3d.backends": 0,
    "parallel3d.child_process": 0,
    "parallel3d.random_keys": 0,
    "parallel3d.pipeline.schedules": -1,  # the configuration takes names, limits and messages from them
    "parallel3d.pipeline.chunk_layout": -1,
    "parallel3d.optim.update_rules": -1,  # the configuration takes names, settings and states from them
    "parallel3d.config": 0,
    "parallel3d.parallel": 1,
    "parallel3d.precision": 1,
    "parallel3d.layers": 2,
    "parallel3d.recompute": 2,
    "parallel3d.data": 2,
    "models": 3,
    "parallel3d.pipeline": 4,
    "parallel3d.optim": 5,
    "parallel3d.checkpoint": 6,
    "parallel3d.debug": 6,
    "parallel3d.monitor": 6,
    "parallel3d.elastic": 7,
    "parallel3d.trainer": 8,
    "parallel3d.comparison": 9,
    "parallel3d.worker": 9,
    "parallel3d.inprocess": 10,
    "models.hf_export": 10,
    "models.hf_import": 10,
    "models.initial_weights": 10,
    "launch": 11,
}
"""Floor of a module or of all modules in a package; the longest name that fits counts."""

PURE: tuple[str, ...] = (
    "parallel3d.errors",
    "parallel3d.ramps",
    "parallel3d.size_schedule",
    "parallel3d.backends",
    "parallel3d.families",
    "parallel3d.config",
    *(f"parallel3d.parallel.{name}" for name in ("grid", "sharding")),
    "parallel3d.precision.fixed_point",
    "parallel3d.precision.loss_scale",
    *(
        f"parallel3d.pipeline.{name}"
        for name in ("instructions", "partition", "request", "routes", "simulator", "planner", "check", "timeline")
    ),
    *(f"parallel3d.pipeline.{name}" for name in ("chunk_layout", "schedules", "component_tables", "mailboxes")),
    "parallel3d.pipeline.route_map",
    "parallel3d.layers.micro_batch",
    "parallel3d.data.reader",
    *(f"parallel3d.optim.{name}" for name in ("bucket_plan", "shard_map", "state_norms", "update_rules")),
    *(f"parallel3d.checkpoint.{name}" for name in ("tensor_chunks", "index")),
    *(
        f"parallel3d.monitor.{name}"
        for name in ("loss_ratio", "spikes", "divergence", "training_monitor", "correlation", "history", "uptime")
    ),
    *(f"parallel3d.monitor.{name}" for name in ("flops", "evaluation_interval", "tuning")),
    "parallel3d.debug.replica_check",
    *(
        f"parallel3d.elastic.protocol.{name}"
        for name in ("membership", "survivability", "failover", "state_machine", "restart_policy")
    ),
    "parallel3d.elastic.hang_report",
    *(f"parallel3d.elastic.coordinator.{name}" for name in ("recovery_log", "drains")),
    *(f"parallel3d.elastic.guardian.{name}" for name in ("launcher_env", "slurm")),
    *(
        f"parallel3d.trainer.{name}"
        for name in ("learning_rate", "entry", "entry_layout", "state", "batching", "plans", "divergence_check")
    ),
)
NAMES_TENSORS: tuple[str, ...] = ("parallel3d.optim.update_rules",)
"""Pure files whose functions take tensors: they name torch's types under TYPE_CHECKING, and import nothing of it."""
TENSORS_ONLY: tuple[str, ...] = ("parallel3d.random_keys", "parallel3d.recompute", "parallel3d.precision")

MAY_READ_ENVIRONMENT: tuple[str, ...] = (
    "launch/",
    "parallel3d/elastic/guardian/launcher_env.py",
    "parallel3d/worker/device.py",
)

Checker = Callable[[str, str], Iterator[str]]


# --- checkers ---------------------------------------------------------------------------------------------------------


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
    for line, imported in project_imports(path, source):
        other = floor_of(imported)
        if module.startswith("parallel3d") and not imported.startswith("parallel3d"):
            yield f"{path}:{line}: parallel3d imports {imported}"
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


def check_waits(path: str, source: str) -> Iterator[str]:
    """Calls under parallel3d/ that may block for ever."""
    if not path.startswith("parallel3d/") or not any(
        is_in(name, BLOCKING_MODULES) for _, name in imports(path, source)
    ):
        return
    tree, lines = ast.parse(source), source.splitlines()
    for call, function in calls_with_function(tree):
        said = any(re.search(r"# bounded: \S", line) for line in lines[call.lineno - 1 : call.end_lineno])
        if may_block(call) and not said and not (function and has_token(function)):
            yield f"{path}:{call.lineno}: {ast.unparse(call)} without timeout, abort token or '# bounded: <why>'"


def check_docstring(path: str, source: str) -> Iterator[str]:
    """Files that do not say what they are."""
    if source.strip() and not ast.get_docstring(ast.parse(source)):  # an empty __init__ says nothing
        yield f"{path}: has no docstring"


def check_length(path: str, source: str) -> Iterator[str]:
    """Files and functions too long to be read in one go."""
    if (num_lines := len(source.splitlines())) > (limit := max(MAX_LINES, LONGER.get(path, 0))):
        yield f"{path}: {num_lines} lines, more than {limit}"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > (limit := max(MAX_FUNCTION_LINES, LONGER.get(f"{path} {node.name}", 0))):
                yield f"{path}:{node.lineno}: {node.name} has {num_lines} lines, more than {limit}"


CHECKERS: tuple[Checker, ...] = (
    check_floors,
    check_kinds,
    check_globals,
    check_environment,
    check_waits,
    check_docstring,
    check_length,
)


# --- imports ----------------------------------------------------------------------------------------------------------


def module_of(path: str) -> str:
    """parallel3d/parallel/abort.py -> parallel3d.parallel.abort; a package's __init__ is the package."""
    return ".".join(PurePosixPath(path).with_suffix("").parts).removesuffix(".__init__")


def folder_of(module: str) -> str:
    """The part whose files may import each other: a package under parallel3d, or models, or launch."""
    parts = module.split(".")
    return ".".join(parts[: 2 if parts[0] == "parallel3d" else 1])


def floor_of(module: str) -> int | None:
    parts = module.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((FLOORS[prefix] for prefix in prefixes if prefix in FLOORS), None)


def is_in(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def imports(path: str, source: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything imported anywhere in the file; `from a import b` counts as a.b."""
    package = PurePosixPath(path).parent.parts
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def type_checking_lines(source: str) -> set[int]:
    """Lines in blocks `if TYPE_CHECKING:`, which only a type checker reads."""
    blocks = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.If))
    types = (node for node in blocks if ast.unparse(node.test) == "TYPE_CHECKING")
    return {line for node in types for part in node.body for line in range(part.lineno, (part.end_lineno or 0) + 1)}


def project_imports(path: str, source: str) -> Iterator[tuple[int, str]]:
    for line, imported in imports(path, source):
        if is_in(imported, ("parallel3d", "models", "launch")):
            yield line, imported


# --- waits ------------------------------------------------------------------------------------------------------------

BLOCKING_MODULES: tuple[str, ...] = (
    "asyncio",
    "concurrent",
    "fcntl",
    "multiprocessing",
    "os",  # waitpid
    "queue",
    "select",
    "selectors",
    "socket",
    "subprocess",
    "threading",
    "torch.distributed",
)

NUM_ARGUMENTS_WITH_TIMEOUT: dict[str, int] = {
    "wait": 1,
    "join": 1,  # str.join has its argument, too
    "result": 1,
    "communicate": 2,
    "get": 1,  # dict.get has an argument; queue.get(True) is not written here
    "acquire": 1,
    "wait_for": 2,
    "recv": 99,
    "recv_into": 99,
    "recvfrom": 99,
    "accept": 99,
    "select": 1,  # selectors; select.select has three lists before its timeout, seen below
}
"""Calls that may block, and the number of positional arguments from which on they have a timeout (99: never)."""


def may_block(call: ast.Call) -> bool:
    """True for a call of a method that waits, without a timeout."""
    if not isinstance(call.func, ast.Attribute):
        return False
    name, owner = call.func.attr, ast.unparse(call.func.value)
    if name == "put":  # of a queue: other objects called so have no queue in their name
        bounded, owner_waits = len(call.args) >= 3, "queue" in owner.lower()
    elif (owner, name) == ("select", "select"):
        bounded, owner_waits = len(call.args) >= 4, True
    elif name in ("waitpid", "flock"):
        bounded, owner_waits = bool(re.search("WNOHANG|LOCK_NB|LOCK_UN", ast.unparse(call))), True
    elif name in NUM_ARGUMENTS_WITH_TIMEOUT:
        bounded, owner_waits = len(call.args) >= NUM_ARGUMENTS_WITH_TIMEOUT[name], True
    else:
        return False
    return owner_waits and not bounded and not any(gives_end(keyword) for keyword in call.keywords)


def gives_end(keyword: ast.keyword) -> bool:
    """timeout=<not None>, block=False or blocking=False."""
    value = keyword.value.value if isinstance(keyword.value, ast.Constant) else ...
    if keyword.arg in ("timeout", "timeout_s"):
        return value is not None
    return keyword.arg in ("block", "blocking") and value is False


def calls_with_function(tree: ast.AST, function: ast.AST | None = None) -> Iterator[tuple[ast.Call, ast.AST | None]]:
    """All calls, each with the outermost function around it."""
    for node in ast.iter_child_nodes(tree):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if isinstance(node, ast.Call):
            yield node, function
        yield from calls_with_function(node, function or (node if is_function else None))


def has_token(function: ast.AST) -> bool:
    """True if an abort token is named anywhere in the function (tokens of text are not: num_tokens, token_ids)."""
    names = {
        getattr(node, field, None)
        for node in ast.walk(function)
        for field in ("arg", "id", "attr")  # parameters and keywords, names, attributes
    }
    return any(re.search(r"(^|_)token$|AbortToken$", name) for name in names if isinstance(name, str))


# --- the tree as it is ------------------------------------------------------------------------------------------------


def sources() -> Iterator[tuple[str, str]]:
    for top in ("parallel3d", "models", "launch"):
        for path in sorted((ROOT / top).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text()


@pytest.mark.parametrize("checker", CHECKERS, ids=lambda checker: checker.__name__)
def test_the_tree(checker: Checker):
    wrong = [finding for path, source in sources() for finding in checker(path, source)]
    assert not wrong, "\n" + "\n".join(wrong)


def names_used_twice(paths_and_names: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Names that stand for several things: name -> paths."""
    paths: dict[str, list[str]] = defaultdict(list)
    for path, name in paths_and_names:
        paths[name].append(path)
    return {name: found for name, found in paths.items() if len(found) > 1}


def test_a_class_name_is_used_once():
    classes = (
        (path, node.name)
        for path, source in sources()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
    )
    assert not names_used_twice(classes)


def test_a_file_name_is_used_once():
    """A command may have the name of the library module that does its work: launch/average.py."""
    files = [path for path, _ in sources() if not path.endswith("__init__.py")]
    for commands in (True, False):
        named = ((path, PurePosixPath(path).stem) for path in files if path.startswith("launch/") is commands)
        assert not names_used_twice(named)


@pytest.mark.parametrize("folder", UNWANTED_WORDING)
def test_english(folder: str):
    found = english.findings(folder)
    print(f"{folder}: {len(found)} of {UNWANTED_WORDING[folder]}")
    assert len(found) <= UNWANTED_WORDING[folder], "\n" + "\n".join(found)


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


def test_the_documentation_has_the_floors():
    text = (ROOT / "docs" / "architecture.md").read_text()
    found = FLOORS_IN_DOCS.search(text)
    assert found and found[0] == f"{found[1]}{floor_table()}\n{found[2]}", "run python -m tests.test_architecture"


def test_files_are_found():
    found = dict(sources())
    assert {"parallel3d/errors.py", "parallel3d/config/load.py", "parallel3d/ramps.py"} <= set(found)


# --- the checkers themselves ------------------------------------------------------------------------------------------

GRID = "parallel3d/parallel/grid.py"
LION = "parallel3d/optim/update_rules/lion.py"
GUARDIAN = "parallel3d/elastic/guardian/guardian.py"


@pytest.mark.parametrize(
    ("checker", "path", "source"),
    [
        (check_floors, GRID, "from parallel3d.optim.clip import clip"),
        (check_floors, GRID, "import parallel3d.precision.p2p"),  # same floor, another folder
        (check_floors, GRID, "from parallel3d import sharding"),
        (check_floors, GRID, "from ..optim import clip"),
        (check_floors, GRID, "def f():\n    from parallel3d.optim import clip"),
        (check_floors, GRID, "from parallel3d.attic import clip"),
        (check_floors, GRID, "from parallel3d import __version__"),
        (check_floors, "parallel3d/attic/clip.py", ""),
        (check_floors, "parallel3d/trainer/build.py", "from models.llama import Llama"),
        (check_floors, "parallel3d/trainer/build.py", "import launch.train"),
        (check_floors, "models/llama.py", "from parallel3d.pipeline import stage"),
        (check_floors, "parallel3d/errors.py", "from parallel3d.ramps import Ramp"),
        (check_floors, "parallel3d/__init__.py", "from parallel3d.errors import ConfigError"),
        (check_kinds, GRID, "import torch"),
        (check_kinds, GRID, "from torch import nn"),
        (check_kinds, GRID, "def f():\n    import torch.distributed as dist"),
        (check_kinds, "parallel3d/pipeline/planner.py", "from parallel3d.pipeline.stage import Stage"),
        (check_kinds, "parallel3d/config/load.py", "from parallel3d.parallel import abort"),
        (check_kinds, "parallel3d/random_keys.py", "from torch import distributed"),
        (check_kinds, LION, "import torch\nif TYPE_CHECKING:\n    from torch import Tensor"),
        (check_kinds, LION, "if TYPE_CHECKING:\n    x = 1\nelse:\n    from torch import Tensor"),
        (check_kinds, GRID, "if TYPE_CHECKING:\n    from torch import Tensor"),
        (check_kinds, "parallel3d/precision/sums.py", "import torch.distributed as dist"),
        (check_globals, GRID, "def f():\n    global x\n    x = 1"),
        (check_environment, GRID, "import os\nx = os.environ['RANK']"),
        (check_environment, GRID, "import os\nx = os.getenv('RANK')"),
        (check_environment, "models/llama.py", "from os import environ"),
        (check_environment, GUARDIAN, "import os\nx = dict(os.environ)"),
        (check_waits, GUARDIAN, "import threading\ndef f(event):\n    event.wait()"),
        (check_waits, GUARDIAN, "import threading\ndef f(event):\n    event.wait(timeout=None)"),
        (check_waits, GUARDIAN, "import threading\ndef f(self):\n    return self.queue.get()"),
        (check_waits, GUARDIAN, "import threading\ndef f(self, x):\n    self.queue.put(x)"),
        (check_waits, GUARDIAN, "import threading\ndef f(thread, num_tokens, token_ids):\n    thread.join()"),
        (check_waits, GUARDIAN, "import threading\ndef f(lock):\n    lock.acquire()"),
        (check_waits, GUARDIAN, "import threading\ndef f(sock):\n    return sock.recv(4)"),
        (check_waits, GUARDIAN, "import threading\ndef f(sock):\n    return sock.accept()  # bounded:"),
        (check_waits, GUARDIAN, "import threading\ndef f(selector):\n    return selector.select()"),
        (check_waits, GUARDIAN, "import threading\ndef f(r):\n    return select.select(r, [], [])"),
        (check_waits, GUARDIAN, "import threading\ndef f(pid):\n    return os.waitpid(pid, 0)"),
        (check_waits, GUARDIAN, "import fcntl\ndef f(file):\n    fcntl.flock(file, fcntl.LOCK_EX)"),
        (check_waits, GUARDIAN, "from torch import distributed\ndef f(work):\n    work.wait()"),
        (check_waits, GUARDIAN, "import threading\ndef f(process):\n    process.communicate()"),
        (check_waits, GUARDIAN, "import threading\nthread.join()"),
        (check_docstring, GRID, "x = 1"),
        (check_length, GRID, "x = 1\n" * (MAX_LINES + 1)),
    ],
)
def test_a_checker_flags(checker: Checker, path: str, source: str):
    assert len(list(checker(path, source))) >= 1


@pytest.mark.parametrize(
    ("checker", "path", "source"),
    [
        (
            check_floors,
            "parallel3d/optim/clip.py",
            "import torch\nfrom parallel3d.parallel import group\nfrom . import adamw",
        ),
        (check_floors, "parallel3d/optim/clip.py", "from parallel3d.optim.update_rules.update_rule import UpdateRule"),
        (check_floors, "parallel3d/parallel/groups.py", "from parallel3d.parallel.abort import AbortToken"),
        (check_floors, "parallel3d/ramps.py", "from parallel3d.errors import ConfigError"),
        (check_floors, "launch/train.py", "from models.llama import Llama\nfrom parallel3d.trainer.loop import run"),
        (check_floors, "parallel3d/__init__.py", '"""What this is."""'),
        (check_kinds, "parallel3d/parallel/groups.py", "import torch.distributed"),
        (check_kinds, "parallel3d/pipeline/planner.py", "from parallel3d.pipeline.check import check\nimport heapq"),
        (check_kinds, "parallel3d/random_keys.py", "import torch"),
        (check_kinds, LION, "if TYPE_CHECKING:\n    from torch import Tensor"),
        (check_environment, "launch/train.py", "import os\nx = os.environ"),
        (check_environment, "parallel3d/elastic/guardian/launcher_env.py", "import os\nx = os.environ"),
        (check_waits, "launch/train.py", "import threading\ndef f(event):\n    event.wait()"),
        (check_waits, "parallel3d/optim/distributed_optimizer.py", "import torch\ndef f(work):\n    work.wait()"),
        (check_waits, GUARDIAN, "import fcntl\ndef f(file):\n    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)"),
        (check_waits, GUARDIAN, "import threading\ndef f(event, token):\n    event.wait()"),
        (
            check_waits,
            GUARDIAN,
            "import threading\ndef f(self, event):\n    self._abort_token.check()\n    event.wait()",
        ),
        (check_waits, GUARDIAN, "import threading\ndef f(token):\n    def g():\n        queue.get()\n    return g"),
        (
            check_waits,
            GUARDIAN,
            "import threading\ndef f(thread):\n    thread.join(5)\n    event.wait(timeout=1)\n    queue.get(timeout=2)",
        ),
        (
            check_waits,
            GUARDIAN,
            "import threading\ndef f(names, table):\n    return ', '.join(names), table.get('x'), queue.put_nowait(1)",
        ),
        (check_waits, GUARDIAN, "import threading\ndef f(table):\n    table.put(1)\n    queue.put(1, block=False)"),
        (
            check_waits,
            GUARDIAN,
            "import threading\ndef f(pid):\n    select.select([], [], [], 1)\n    os.waitpid(pid, os.WNOHANG)",
        ),
        (
            check_waits,
            GUARDIAN,
            "import threading\ndef f(thread):\n    thread.join(\n    )  # bounded: its socket is closed",
        ),
    ],
)
def test_a_checker_lets_pass(checker: Checker, path: str, source: str):
    assert list(checker(path, source)) == []


def test_no_two_files_of_tests_have_the_same_name():
    """pytest imports them by it: of two the second is not run where both are collected."""
    names = Counter(path.name for path in ROOT.glob("tests/**/test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_wording():
    python = '"""What a run leaves."""\n# is no test, is no longer\nx = "nobody is told"\nshall = 1\n'
    assert [word for _, word in english.unwanted_in_python(python)] == ["is no ", "nobody", "told", "What a ..."]
    markdown = "Anew.\n```\nshall\n```\nfor a person"
    assert list(english.unwanted_in_markdown(markdown)) == [(1, "Anew"), (5, "for a person")]


if __name__ == "__main__":  # writes the table of floors into the documentation
    page = ROOT / "docs" / "architecture.md"
    page.write_text(FLOORS_IN_DOCS.sub(lambda found: f"{found[1]}{floor_table()}\n{found[2]}", page.read_text()))
