"""Small worlds of real processes: run as a script, CASE RUN_DIRECTORY, this file is their launcher."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from parallel3d.elastic.frames import MAX_VALUE_BYTES
from parallel3d.elastic.guardian.launcher_env import read_launcher_env
from parallel3d.elastic.launch import run_workers
from parallel3d.elastic.settings import LaunchTimeouts
from parallel3d.elastic.worker.process import WorkerContext
from parallel3d.errors import DataError, UserError
from parallel3d.monitor.run_folder import RunFolder
from parallel3d.monitor.sinks import RunReporter
from tests.support.processes import write_pids


def start(case: str, directory: Path, *, launcher: tuple[str, ...] = (), **variables: str) -> subprocess.Popen[str]:
    """The process of a case, its output piped."""
    return subprocess.Popen(
        [sys.executable, *launcher, __file__, case, str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2]), **variables},
        start_new_session=True,
    )


def leave_marks(context: WorkerContext) -> None:
    """Writes a file that names this process, so that a test can check that it has ended."""
    context.control.publish({"kind": "hello", "coordinates": f"pp{context.rank} dp0 tp0"})
    write_pids(Path(sys.argv[2]), context.rank)


def train_until_aborted(context: WorkerContext, step: int = 1) -> int:
    """Steps of 20 ms until the run is over; the leader reports each."""
    while not context.control.stop_requested:
        context.heartbeat.step = step
        context.control.token.sleep(0.02)
        if context.rank == 0:
            context.control.publish({"kind": "step", "step": step, "loss": 1.0 / step, "tokens": step * 8})
        step += 1
    return 0


def good(context: WorkerContext) -> int:
    """Exchanges values through the store, reports three steps and a summary."""
    control = context.control
    leave_marks(context)
    print(f"hello from rank {context.rank} of {context.world_size}")
    control.set(f"value/{context.rank}", bytes([context.rank]) * 70_000)
    values = [control.get(f"value/{rank}", control.token) for rank in range(context.world_size)]
    assert values == [bytes([rank]) * 70_000 for rank in range(context.world_size)]
    assert not control.check(["value/0", "nothing"], control.token)
    while control.add("arrived", 0, control.token) < context.world_size:
        control.add("arrived", 1, control.token)
    if context.rank == 0:
        control.publish({"kind": "total", "num_steps": 3})
        for step in (1, 2, 3):
            fields = {"step": step, "loss": 4.0 - step, "tokens": 8 * step, "tokens_per_s": 80.0, "step_s": 0.1}
            control.publish({"kind": "step", **fields})
        control.publish({"kind": "notice", "text": "nearly there"})
        control.publish({"kind": "evaluation", "step": 3, "loss": 1.25})
        control.publish({"kind": "summary", "final_loss": 1.0, "unigram_entropy": 4.0, "tokens": 24, "world": "2"})
    return 0


def large(context: WorkerContext) -> int:
    """Each rank stores a value of the largest size, and gets the other's."""
    control, rank = context.control, context.rank
    control.set(f"value/{rank}", bytes([rank]) * MAX_VALUE_BYTES)
    assert control.get(f"value/{1 - rank}", control.token) == bytes([1 - rank]) * MAX_VALUE_BYTES
    return 0


def killed(context: WorkerContext) -> int:
    leave_marks(context)
    if context.rank == 1:
        context.heartbeat.step = 7
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    return train_until_aborted(context, step=7)


def failing(context: WorkerContext) -> int:
    """Rank 1 can't go on; rank 0 fails by that alone, and reports it first."""
    leave_marks(context)
    has_failed = Path(sys.argv[2], "rank 0 has failed")
    if context.rank == 1:
        context.heartbeat.step = 12
        while not has_failed.exists() or not context.control.token.aborted:
            time.sleep(0.01)
        raise DataError("corpus.txt is empty")
    has_failed.touch()
    raise ConnectionResetError("rank 1 closed its socket")


def stubborn(context: WorkerContext) -> int:
    """Rank 0 fails while rank 1 neither looks at its token nor leaves."""
    leave_marks(context)
    if context.rank == 0:
        time.sleep(0.3)
        raise ValueError("a defect")
    time.sleep(60)
    return 0


def endless(context: WorkerContext) -> int:
    leave_marks(context)
    return train_until_aborted(context)


def deaf(context: WorkerContext) -> int:
    """Does not heed a stop."""
    leave_marks(context)
    if context.rank == 0:
        context.control.publish({"kind": "step", "step": 1, "loss": 1.0, "tokens": 8})
    time.sleep(60)
    return 0


def exit_code(context: WorkerContext) -> int:
    if context.rank == 1:
        sys.exit(9)
    return train_until_aborted(context)


def reduced(context: WorkerContext) -> int:
    """A gloo all-reduce of groups that met through the control channel, one of them behind a prefix."""
    from datetime import timedelta

    import torch
    from torch.distributed import PrefixStore, ProcessGroupGloo

    from parallel3d.elastic.worker.torch_store import ControlStore

    store = ControlStore(context.control, context.control.token, size=context.world_size)
    for name in ("generation0/world", "generation1/world"):
        group = ProcessGroupGloo(PrefixStore(name, store), context.rank, context.world_size, timedelta(seconds=20))
        value = torch.tensor([10.0**context.rank])
        group.allreduce([value]).wait()
        print(f"{name}: {value.item():g}")
    return 0


def half_built(context: WorkerContext) -> int:
    """Rank 2 fails while the others wait for it to join a gloo group."""
    from datetime import timedelta

    from torch.distributed import ProcessGroupGloo

    from parallel3d.elastic.worker.torch_store import ControlStore

    leave_marks(context)
    if context.rank == 2:
        time.sleep(0.5)
        raise DataError("no shard for rank 2")
    store = ControlStore(context.control, context.control.token)
    ProcessGroupGloo(store, context.rank, context.world_size, timedelta(seconds=60))
    return 0


def light_guardian(context: WorkerContext) -> int:
    assert gc.get_freeze_count() > 0, "collections copy the pages that processes share"
    return 0


def main() -> int:
    case, directory = sys.argv[1], Path(sys.argv[2])
    env = read_launcher_env(os.environ)
    world_size = env.world_size if env else (3 if case in ("reduced", "half_built") else 2)
    try:
        code = run_workers(
            globals()[case],
            world_size=world_size,
            logs=directory / "logs",
            open_report=lambda: RunReporter(
                RunFolder(directory, config="{}", environment={}), title=case, charts=case == "good"
            ),
            env=env,
            preload=("torch",) if case in ("reduced", "half_built") else (),
            timeouts=LaunchTimeouts(
                start_s=float(os.environ.get("START_S", "100")),
                connect_s=float(os.environ.get("CONNECT_S", "100")),
                abort_grace_s=float(os.environ.get("ABORT_GRACE_S", "1")),
                stop_grace_s=float(os.environ.get("STOP_GRACE_S", "1.5")),
            ),
        )
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if case == "light_guardian":
        assert "torch" not in sys.modules
    return code


if __name__ == "__main__":
    sys.exit(main())
