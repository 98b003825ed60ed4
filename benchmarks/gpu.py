"""The first visit to a machine with a GPU, in one command of at most ten minutes.

    python benchmarks/gpu.py --out visit                       # all parts, in order
    python benchmarks/gpu.py --out visit limits hlat_7b        # some; finished ones are skipped
    python benchmarks/gpu.py --out visit --smoke --device cpu  # all parts at tiny sizes, without a GPU

Each part is a process with a time limit of its own. Everything it finds goes to FOLDER/visit.jsonl, a line at a time,
so that a part that is killed leaves what it had; profiles go beside it. Peers (torchtitan, transformers with
liger-kernel) are measured in the same visit where they can be imported. Random tokens: no text, no tokenizer.
docs/devices.md says what to bring.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parent.parent
VISIT = "visit.jsonl"
LEAST_S = 10.0
"""A part is not started with less time left."""
SMOKE_PART_S = 120.0

PARTS: Mapping[str, tuple[str, float]] = MappingProxyType(
    {
        "limits": ("machine_limits:measure_limits", 25),
        "checks": ("device_checks:run_tests", 150),
        "kernels": ("device_checks:run_kernel_tests", 60),
        "gpt2_124m": ("speed_parts:ours", 40),
        "gpt2_124m_peers": ("speed_parts:peers", 60),
        "llama_1.26b": ("speed_parts:ours", 40),
        "llama_1.26b_peers": ("speed_parts:peers", 80),
        "hlat_7b": ("speed_parts:ours", 90),
        "hlat_7b_peers": ("speed_parts:peers", 110),
        "profiles": ("profile_parts:profile_steps", 70),
        "memory": ("memory_parts:measure_memory", 70),
        "deterministic": ("memory_parts:compare_runs", 45),
        "lengths": ("memory_parts:change_lengths", 45),
        "gpt2_163m": ("speed_parts:ours", 40),
    }
)
"""Module and function in benchmarks/device, and seconds at most, by part. The later ones may find no time left."""


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.limit
    done = set() if options.again else finished_parts(options.out / VISIT)
    outcomes = {}
    for name in options.parts or PARTS:
        left_s = deadline - time.monotonic()
        if name in done:
            outcomes[name] = "done before"
        elif left_s < LEAST_S:
            outcomes[name] = "no time left"
        else:
            limit_s = SMOKE_PART_S if options.smoke else PARTS[name][1]
            outcomes[name] = run_part(name, options, min(left_s, limit_s))
        print(f"{name}: {outcomes[name]}", flush=True)
    return 0 if all(outcome in ("done", "done before") for outcome in outcomes.values()) else 1


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--limit", type=float, default=585.0, metavar="SECONDS", help="of all parts together")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, a step or two of each")
    parser.add_argument("--again", action="store_true", help="also parts that are finished")
    options = parser.parse_args(arguments)
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"unknown parts: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return options


def finished_parts(path: Path) -> set[str]:
    """The parts that have ended well, by the lines of earlier calls."""
    return {line["part"] for line in read_lines(path) if line.get("event") == "done"}


def read_lines(path: Path) -> list[dict[str, object]]:
    """The whole lines of a visit so far; the last one may be cut off where a process was killed."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines


def run_part(name: str, options: argparse.Namespace, limit_s: float) -> str:
    """Runs a part in a process of its own, writes down how it ended, and returns that in words."""
    started = time.monotonic()
    process = subprocess.Popen(part_command(name, options), cwd=ROOT, env=environment(), start_new_session=True)
    try:
        code: int | None = process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        code = None
    kill_group(process.pid)
    process.wait(timeout=30)
    event = "done" if code == 0 else "out of time" if code is None else f"failed with {code}"
    seconds = round(time.monotonic() - started, 1)
    with (options.out / VISIT).open("a") as file:
        file.write(json.dumps({"part": name, "event": event, "seconds": seconds}) + "\n")
    return event


def part_command(name: str, options: argparse.Namespace) -> Sequence[str]:
    command = [sys.executable, "-m", "benchmarks.device.part_process", name, PARTS[name][0]]
    command += ["--out", str(options.out.resolve()), "--device", options.device]
    return [*command, "--smoke"] if options.smoke else command


def environment() -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def kill_group(pid: int) -> None:
    """Ends what is left of a part: its own process and those that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
