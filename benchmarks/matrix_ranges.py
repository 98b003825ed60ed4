"""How evenly a matrix-wise update rule (Muon) divides the layers' matrices over the replicas. Nothing runs.

    python benchmarks/matrix_ranges.py --config configs/hlat_7b.json [--layers 8] [--bucket-mib 16 64] [--dp 4 16]

Ranges end at parameter borders, and collectives pad all ranges of a bucket to its longest. Printed for each bucket size
and number of replicas: elements in a reduce-scatter as a multiple of the matrices' elements (1.00: no padding), the
state of the busiest replica as a multiple of the mean, and the replicas without a matrix.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from parallel3d.config.load import load_config
from parallel3d.config.schema import Config
from parallel3d.layers.parameter import parameters_of
from parallel3d.layers.placement import LayerContext
from parallel3d.models.make import make_decoder
from parallel3d.optim.bucket_plan import BucketPlan, plan_buckets
from parallel3d.parallel.group import AbsentGroup
from parallel3d.parallel.sharding import ParamSharding
from parallel3d.parallel.tensor_parallel import TensorParallel
from parallel3d.precision.policy import policy_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--layers", type=int, help="layers of the stage (default: all)")
    parser.add_argument("--bucket-mib", type=float, nargs="+", default=[16.0, 64.0, 256.0])
    parser.add_argument("--dp", type=int, nargs="+", default=[2, 4, 8, 16, 64])
    options = parser.parse_args()
    config = load_config(options.config)
    shardings = stage_shardings(config, options.layers or config.model.num_hidden_layers)
    print("| bucket, MiB | replicas | matrix buckets | reduced / matrices | busiest / mean | without a matrix |")
    print("|--:|--:|--:|--:|--:|--:|")
    for bucket_mib in options.bucket_mib:
        plans = matrix_plans(config, shardings, bucket_mib)
        for num_ranges in options.dp:
            padding, busiest, num_idle = measure_ranges(plans, num_ranges)
            print(f"| {bucket_mib:g} | {num_ranges} | {len(plans)} | {padding:.2f} | {busiest:.2f} | {num_idle} |")


def stage_shardings(config: Config, num_layers: int) -> list[ParamSharding]:
    """The parameters of a stage of `num_layers` layers, without memory for them."""
    ranks = tuple(range(config.parallel.tp_size))
    tp = TensorParallel(group=AbsentGroup(name="none", rank=0, ranks=ranks))
    context = LayerContext(tp=tp, policy=policy_of(config.precision), device="meta")
    num_positions = config.batch.sequence_length
    stage = make_decoder(config.model, range(num_layers), num_positions=num_positions, context=context)
    return [parameter.sharding for parameter in parameters_of(stage)]


def matrix_plans(config: Config, shardings: list[ParamSharding], bucket_mib: float) -> list[BucketPlan]:
    """The buckets that are updated as whole matrices."""
    plans = plan_buckets(
        shardings,
        tp_size=config.parallel.tp_size,
        bucket_elements=int(bucket_mib * 2**20) // policy_of(config.precision).grad.itemsize,
        decay_norms_and_biases=False,
        matrix_wise=True,
    )
    return [plan for plan in plans if plan.key.is_matrix_wise]


def measure_ranges(plans: list[BucketPlan], num_ranges: int) -> tuple[float, float, int]:
    """Elements reduced over those of the matrices, the busiest replica's over the mean, and replicas with none."""
    lengths = [[len(plan.range_of(number, num_ranges)) for number in range(num_ranges)] for plan in plans]
    owned = [sum(each) for each in zip(*lengths)]
    reduced = sum(max(each) * num_ranges for each in lengths)
    return reduced / sum(owned), max(owned) * num_ranges / sum(owned), owned.count(0)


if __name__ == "__main__":
    main()
