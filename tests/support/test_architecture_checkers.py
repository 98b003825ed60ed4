"""Each checker of the architecture flags bad snippets and lets good ones pass."""

from __future__ import annotations

import ast

import pytest

from tests.support import english
from tests.support.architecture import (
    MAX_LINES,
    ROOT,
    Checker,
    check_docstring,
    check_environment,
    check_floors,
    check_globals,
    check_kinds,
    check_length,
)
from tests.support.grid_reads import GRID_READS, check_grid_reads, names_of_the_launch
from tests.support.host_reads import HOST_READS, check_host_reads, reads_device
from tests.support.waits import calls_with_function, check_waits

COMMAND = "parallel3d/commands/train.py"
GRID = "parallel3d/parallel/grid.py"
LION = "parallel3d/optim/update_rules/lion.py"
SUMS = "parallel3d/kernels/triton_sums.py"
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
        (check_floors, "parallel3d/trainer/build.py", "from parallel3d.models.llama import Llama"),
        (check_floors, "parallel3d/inprocess/world.py", "from parallel3d.models.make import make_stage"),
        (check_floors, "parallel3d/trainer/build.py", "from parallel3d.commands import train"),
        (check_floors, "launch/train.py", "from parallel3d.errors import UserError"),
        (check_floors, "parallel3d/models/llama.py", "from parallel3d.pipeline import stage"),
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
        (check_environment, "parallel3d/models/llama.py", "from os import environ"),
        (check_environment, GUARDIAN, "import os\nx = dict(os.environ)"),
        (check_grid_reads, SUMS, "def _reduce_blocks(x):\n    tl.atomic_add(x, 1)"),
        (check_grid_reads, SUMS, "from triton.language import atomic_max"),
        (check_grid_reads, SUMS, "def _add_blocks(x):\n    return tl.program_id(0) % tl.num_programs(0)"),
        (check_grid_reads, SUMS, "def f(device):\n    return properties(device).multi_processor_count"),
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
        (check_host_reads, LION, "def f(loss):\n    return loss.item()"),
        (check_host_reads, LION, "def f(losses):\n    return losses.sum().tolist()"),
        (check_host_reads, LION, "def f(x):\n    return bool(x.isnan().any())"),
        (check_host_reads, LION, "def f(x):\n    torch.cuda.synchronize()\n    return x.cpu()"),
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
        (check_floors, "launch/train.py", "from parallel3d.commands.train import main"),
        (check_floors, COMMAND, "from parallel3d.models.llama import Llama\nfrom parallel3d.trainer.loop import run"),
        (check_floors, "parallel3d/__init__.py", '"""What this is."""'),
        (check_kinds, "parallel3d/parallel/groups.py", "import torch.distributed"),
        (check_kinds, "parallel3d/pipeline/planner.py", "from parallel3d.pipeline.check import check\nimport heapq"),
        (check_kinds, "parallel3d/random_keys.py", "import torch"),
        (check_kinds, LION, "if TYPE_CHECKING:\n    from torch import Tensor"),
        (check_environment, COMMAND, "import os\nx = os.environ"),
        (check_environment, "parallel3d/elastic/guardian/launcher_env.py", "import os\nx = os.environ"),
        (check_host_reads, LION, "def f(copy):\n    return HostCopy(copy).read().tolist(), bool(copy.names)"),
        (check_host_reads, "parallel3d/monitor/memory.py", "def f(x):\n    return x.item()"),
        (check_grid_reads, SUMS, "def _reduce_blocks(x):\n    tl.store(x + tl.num_programs(0), 0)"),
        (check_grid_reads, "parallel3d/kernels/update_table.py", "def f(table):\n    return table.num_programs"),
        (check_grid_reads, "parallel3d/monitor/environment.py", "def f(x):\n    return x.multi_processor_count"),
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


@pytest.mark.parametrize(("path", "function"), HOST_READS)
def test_each_read_that_is_allowed_exists(path: str, function: str):
    calls = calls_with_function(ast.parse((ROOT / path).read_text()))
    assert any(reads_device(call) for call, around in calls if getattr(around, "name", "") == function)


@pytest.mark.parametrize(("path", "function"), GRID_READS)
def test_each_grid_size_that_is_allowed_is_used(path: str, function: str):
    found = names_of_the_launch((ROOT / path).read_text())
    assert ("num_programs", function) in [(name, around) for _, name, around in found]


def test_wording():
    python = '"""What a run leaves."""\n# is no test, is no longer\nx = "nobody is told"\nshall = 1\n'
    assert [word for _, word in english.unwanted_in_python(python)] == ["is no ", "nobody", "told", "What a ..."]
    markdown = "Anew.\n```\nshall\n```\nfor a person"
    assert list(english.unwanted_in_markdown(markdown)) == [(1, "Anew"), (5, "for a person")]
