"""Times what a run's leader measures at its start: libraries for products, and the form of attention, without a cache.

    python benchmarks/start_timing.py --turns 5

Each turn is a process of its own, for libraries prepare themselves at their first call; the configurations are the
quickstart's, which has one thread a rank, and the model of benchmarks/cpu.py in fp32 and bf16 on one and two threads,
with its sequences and with long ones. What any run pays at its first stage and first backward pass whether it measures
or not is paid before: loops in C, a stage on the meta device, and what torch imports there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

QUICKSTART = "quickstart"
LONG = 2048
"""Tokens of a sequence, instead of the workload's."""
CASES = (
    (QUICKSTART, 1),
    *((case, threads) for case in ("fp32", "bf16", f"fp32-{LONG}", f"bf16-{LONG}") for threads in (1, 2)),
)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--measure", nargs=2, metavar=("CASE", "THREADS"), help="one turn, in this process")
    options = parser.parse_args(arguments)
    if options.measure:
        print(json.dumps(measure(options.measure[0], int(options.measure[1]))))
        return 0
    print(f"{'seconds of the clock (of the processor)':40}{'median':>16}{'longest':>16}")
    for case, threads in CASES:
        turns = [one_turn(case, threads) for _ in range(options.turns)]
        walls, cpus = zip(*turns)
        figures = (f"{pick(walls):.3f} ({pick(cpus):.3f})" for pick in (median, max))
        name = case if case == QUICKSTART else f"benchmarks/cpu.py {case}"
        print(f"{f'{name}, {threads} threads':40}" + "".join(f"{figure:>16}" for figure in figures), flush=True)
    return 0


def one_turn(case: str, threads: int) -> tuple[float, float]:
    command = [sys.executable, __file__, "--measure", case, str(threads)]
    wall, cpu = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return wall, cpu


def measure(case: str, threads: int) -> tuple[float, float]:
    """Seconds of the clock and of the processor that the leader takes to choose."""
    import torch

    from parallel3d.config.load import load_config
    from parallel3d.elastic.protocol.restart_policy import StartInstruction
    from parallel3d.kernels.c_loops import has_c_loops
    from parallel3d.models.make import make_stage
    from parallel3d.parallel.tensor_parallel import solo_region
    from parallel3d.worker.gemm_timing import agree_on_gemm

    with tempfile.TemporaryDirectory() as folder:
        config = load_config(config_file(case, Path(folder)), [f"data.cache_directory={folder}/cache"])
        torch.set_num_threads(threads)
        has_c_loops()  # compiled once for a machine
        make_stage(config, range(1), solo_region(), torch.device("meta"))
        probe = torch.ones(2, requires_grad=True)
        torch.autograd.grad(probe * 2, probe, torch.ones(2))
        context = SimpleNamespace(control=SimpleNamespace(set=lambda *_: None, publish=lambda _: None))
        start = StartInstruction(attempt=0, checkpoint=None, data=None)
        begun, begun_cpu = time.perf_counter(), time.process_time()
        agree_on_gemm(config, context, torch.device("cpu"), start, make_stage, is_leader=True)  # type: ignore[arg-type]
        return time.perf_counter() - begun, time.process_time() - begun_cpu


def config_file(case: str, folder: Path) -> Path:
    """The quickstart's configuration, or one of the benchmark's model for one process."""
    from benchmarks.contestants import VARIANTS, our_config
    from benchmarks.peers.workload import Workload

    if case == QUICKSTART:
        return ROOT / "configs" / "quickstart.json"
    variant = next(each for each in VARIANTS if each.name == "ours single")
    policy, _, length = case.partition("-")
    workload = Workload(policy=policy, sequence_length=int(length or Workload.sequence_length))
    config = our_config(variant, workload, folder / "run", num_cores=2, num_steps=3)
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
