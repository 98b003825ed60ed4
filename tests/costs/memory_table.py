"""Prints planned and measured peak memory of 16 layouts and 3 policies: `python -m tests.costs.memory_table`."""

from __future__ import annotations

from parallel3d.costs.rank_memory import estimate_memory
from tests.costs.counted_ranks import parts_of, run_counted
from tests.costs.test_rank_memory import LAYOUTS, configure

POLICIES = ("fp32", "bf16", "bf16_sr")


def main() -> None:
    for policy in POLICIES:  # tables that threads share are made by the first run of a process
        run_counted(configure({}, policy), steps=1)
    print(f"| layout | {' | '.join(f'{policy}: planned, measured MiB, ratio' for policy in POLICIES)} |")
    print(f"|---|{'--:|' * len(POLICIES)}")
    for name in LAYOUTS:
        print(f"| {name} | {' | '.join(compare(name, policy) for policy in POLICIES)} |", flush=True)


def compare(name: str, policy: str) -> str:
    """The stage on which plan and run differ most."""
    config = configure(LAYOUTS[name], policy)
    found = run_counted(config, steps=2)
    pairs = [
        (memory.tensors, max(peak for runtime, peak in found if runtime.coordinates.pp == memory.stage))
        for memory in estimate_memory(config, parts_of(config), on_device=False)
    ]
    planned, measured = max(pairs, key=lambda pair: abs(pair[1] / pair[0] - 1))
    return f"{planned / 2**20:.2f}, {measured / 2**20:.2f}, {measured / planned:.3f}"


if __name__ == "__main__":
    main()
