"""Predicts the speed and the memory of training on a GPU that is not there: counts a step on meta tensors.

    python benchmarks/device_plan.py                                     # 7B, 1.26B and GPT-2 124M on H100 and H200
    python benchmarks/device_plan.py --only hlat_7b --kernels torch,triton --recompute none,selective --tp 1,2
    python benchmarks/device_plan.py --rows my_devices.json --devices MINE

The modules, the buckets and the step are those of a run (parallel3d/rehearsal); times are a model of the device
(rehearsal/roofline.py), not measurements. The ideal beside each count is that of rehearsal/ideal_counts.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.device.workloads import WORKLOADS, load_workload
from parallel3d.errors import UserError
from parallel3d.models.make import make_stage
from parallel3d.rehearsal.config_estimate import describe_on_devices
from parallel3d.rehearsal.device_rows import find_rows
from parallel3d.rehearsal.meta_rank import LayeredRehearsal
from parallel3d.rehearsal.roofline import StepEstimate


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    try:
        rows = find_rows(options.devices, options.rows)
        found = []
        for name, kernels, recompute, tp in variants(options):
            config = load_workload(name, settings_of(kernels, recompute, tp))
            rehearsal = LayeredRehearsal.of(config, make_stage).whole
            estimates, lines = describe_on_devices(config, rehearsal, rows)
            print(f"\n{name}, {kernels} kernels, recompute {recompute}, tp {tp}")
            print("\n".join(lines), flush=True)
            found += [record(name, kernels, recompute, tp, estimate) for estimate in estimates]
        if options.out is not None:
            options.out.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(WORKLOADS), help="workloads, separated by commas")
    parser.add_argument("--kernels", default="triton", help="forms of the kernels: torch, triton or both")
    parser.add_argument("--recompute", default="none", help="modes: none, selective, full or several")
    parser.add_argument("--tp", default="1", help="tensor-parallel sizes")
    parser.add_argument("--devices", default="H100,H200")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="a JSON list of further devices")
    parser.add_argument("--out", type=Path, metavar="FILE", help="writes the figures as JSON")
    return parser.parse_args(arguments)


def variants(options: argparse.Namespace) -> Iterator[tuple[str, str, str, int]]:
    """Workload, form of the kernels, recomputation, tensor-parallel size."""
    for name, kernels, recompute, tp in product(
        *(text.split(",") for text in (options.only, options.kernels, options.recompute, options.tp))
    ):
        if name not in WORKLOADS:
            raise UserError(f"--only {name}: there are {', '.join(WORKLOADS)}")
        yield name, kernels, recompute, int(tp)


def settings_of(kernels: str, recompute: str, tp: int) -> list[str]:
    """The overrides of a variant."""
    return [
        f"run.kernels={kernels}",
        f"parallel.recompute={recompute}",
        f"parallel.tp_size={tp}",
        f"parallel.sequence_parallel={'true' if tp > 1 else 'false'}",
    ]


def record(name: str, kernels: str, recompute: str, tp: int, estimate: StepEstimate) -> dict[str, object]:
    """The figures of one line."""
    return {
        "workload": name,
        "kernels": kernels,
        "recompute": recompute,
        "tp_size": tp,
        "device": estimate.device.name,
        "step_ms": 1e3 * estimate.step_s,
        "tokens_per_s": estimate.tokens_per_s,
        "mfu": estimate.mfu,
        "peak_gib": estimate.peak_gib,
        "phases_ms": {name: 1e3 * phase.total_s for name, phase in estimate.phases.items()},
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
