"""Says what a step consists of on each rank, from the traces of a run: `python benchmarks/step_parts.py runs/NAME`.

The run needs `debug.profile.steps=[21,40] debug.profile.ranks=[0,1,2,3]` on its command line, for four ranks. Counted
is the thread that computes: instructions of the pipeline by their kind (a receive is mostly the wait for its sender),
and what remains of a step between them. The first recorded step, in which the profiler starts, does not count.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def parts_of(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Milliseconds of a mean step by kind, "step" being all of it and "rest" what no instruction covers."""
    spans = [event for event in events if event.get("ph") == "X" and event.get("cat") == "user_annotation"]
    steps = sorted((event for event in spans if event["name"].startswith("step ")), key=lambda event: event["ts"])[1:]
    sums: Counter[str] = Counter()
    for step in steps:
        covered_until = step["ts"]
        own = [e for e in spans if e["tid"] == step["tid"] and e is not step and _is_within(e, step)]
        for event in sorted(own, key=lambda event: (event["ts"], -event["dur"])):
            if event["ts"] >= covered_until:  # not within another instruction
                sums[event["name"].split(" ")[0]] += event["dur"]
                covered_until = event["ts"] + event["dur"]
    whole = sum(step["dur"] for step in steps)
    sums["rest"] = whole - sum(sums.values())
    return {"step": whole / len(steps) / 1e3, **{name: us / len(steps) / 1e3 for name, us in sums.most_common()}}


def _is_within(event: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return other["ts"] <= event["ts"] and event["ts"] + event["dur"] <= other["ts"] + other["dur"]


def main(folder: Path) -> None:
    for path in sorted((folder / "profile").glob("rank-*.json")):
        parts = parts_of(json.loads(path.read_text())["traceEvents"])
        print(f"{path.stem}: " + ", ".join(f"{name} {ms:.1f} ms" for name, ms in parts.items()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
