"""What restarts cost, and that they change nothing: a run that must begin again, beside the same run undisturbed.

`python benchmarks/restarts.py [--steps 200] [--every 20] [--out build/restarts.json]` trains the quickstart's model
on 2 stages x 1 replica, where every loss is fatal, once undisturbed and once with two workers killed and one
divergence. It prints, for each restart, the seconds from the end of a start until the next one is about to train
(checkpoint, wait, new processes, text, groups) and the steps lost; the uptime of the whole, and up to which step both
runs have the same losses. Nothing else may run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from parallel3d.monitor.run_folder import METRICS, SUMMARY, read_metrics


def main() -> None:
    options = parse_arguments()
    with TemporaryDirectory() as folder:
        common = [f"run.num_steps={options.steps}", "parallel.dp_size=1", f"checkpoint.every={options.every}"]
        undisturbed = train(Path(folder) / "undisturbed", *common)
        kills = json.dumps(plan_faults(options.steps))
        disturbed = train(Path(folder) / "disturbed", *common, "restart.max_restarts=3", f"elastic.faults={kills}")
        lines, summary = read_metrics(disturbed / METRICS), json.loads((disturbed / SUMMARY).read_text())
        restarts = [line for line in lines if line.get("event") == "restart"]
        result = {
            "restarts": [describe(lines, restart) for restart in restarts],
            "same_until": first_difference(read_metrics(undisturbed / METRICS), lines),
            **{name: summary[name] for name in ("lost_steps", "productive_s", "wall_s", "uptime")},
            "undisturbed_uptime": json.loads((undisturbed / SUMMARY).read_text())["uptime"],
        }
    print(json.dumps(result, indent=2))
    if options.out:
        Path(options.out).parent.mkdir(parents=True, exist_ok=True)
        Path(options.out).write_text(json.dumps(result, indent=2) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="of the run (200)")
    parser.add_argument("--every", type=int, default=20, help="steps between two checkpoints (20)")
    parser.add_argument("--out", help="a file for the figures")
    return parser.parse_args()


def plan_faults(num_steps: int) -> list[dict[str, Any]]:
    """One in each quarter but the first, each in another start of the run; the divergence last."""
    quarter = num_steps // 4
    return [
        {"rank": 1, "step": quarter + 5, "phase": "backward", "attempt": 0},
        {"rank": 0, "step": 2 * quarter + 5, "phase": "update", "attempt": 1},
        {"rank": 0, "step": 3 * quarter + 5, "kind": "nan", "attempt": 2},
    ]


def train(directory: Path, *overrides: str) -> Path:
    command = [sys.executable, str(ROOT / "launch" / "train.py"), "--config", str(ROOT / "configs" / "quickstart.json")]
    subprocess.run([*command, f"run.directory={directory}", *overrides], check=True, stdout=subprocess.DEVNULL)
    return directory


def describe(lines: list[dict[str, Any]], restart: dict[str, Any]) -> dict[str, Any]:
    """`back_s`: from the end of the start before until the next one has measured its groups."""
    index = lines.index(restart)
    ended = next(line for line in reversed(lines[:index]) if line.get("event") == "ended")
    back = next(line for line in lines[index:] if str(line.get("text", "")).startswith("timeouts:"))
    return {
        "exit_code": ended["exit_code"],
        "lost_steps": restart["lost_steps"],
        "wait_s": restart["wait_s"],
        "back_s": round(back["time"] - ended["time"], 2),
    }


def first_difference(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> int:
    """The last step up to which two runs have the same losses, to the last bit."""
    pairs = zip(*([line["loss"] for line in lines if "event" not in line] for lines in (ours, theirs)))
    return next((number for number, (a, b) in enumerate(pairs) if a != b), len(ours))


if __name__ == "__main__":
    main()
