"""DeepSpeed on its CPU accelerator with the plain Llama: ZeRO-1 over two replicas, or PipelineModule's two stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.pipe import PipelineModule

from benchmarks.peers.llama import build_llama, mean_loss
from benchmarks.peers.steps import report_steps
from benchmarks.peers.training import MicroBatch, adamw, micro_batches, parse_arguments
from benchmarks.peers.workload import Workload


def main() -> None:
    workload, options = parse_arguments(__doc__, kinds=("zero1", "pipeline"))
    deepspeed.init_distributed("gloo")
    {"zero1": run_zero1, "pipeline": run_pipeline}[options.kind](workload, options.steps)
    dist.destroy_process_group()


def run_zero1(workload: Workload, num_steps: int) -> None:
    """Sharded optimizer states; the engine accumulates and steps at each replica's last micro-batch."""
    model = build_llama(workload)
    engine = initialize(model, settings(workload, zero_stage=1, num_replicas=dist.get_world_size()))

    def run_step(step: int) -> float:
        loss = 0.0
        batches = micro_batches(workload, step, dist.get_rank(), dist.get_world_size())
        for ids, targets in batches:
            part = mean_loss(engine(ids).float(), targets)
            engine.backward(part)
            engine.step()
            loss += part.item() / len(batches)
        return loss

    report_steps(num_steps, run_step)


def run_pipeline(workload: Workload, num_steps: int) -> None:
    """1F1B over stages with equal shares of the parameters."""
    model = PipelineModule(
        list(build_llama(workload)),
        num_stages=dist.get_world_size(),
        loss_fn=lambda logits, targets: mean_loss(logits.float(), targets),
        partition_method="parameters",
    )
    engine = initialize(model, settings(workload, zero_stage=0, num_replicas=1))
    batches = endless_batches(workload)
    report_steps(num_steps, lambda step: engine.train_batch(batches).item())


def initialize(model: Any, config: dict[str, Any]) -> Any:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=parameters, optimizer=adamw(parameters), config=config
    )
    return engine


def settings(workload: Workload, *, zero_stage: int, num_replicas: int) -> dict[str, Any]:
    return {
        "train_batch_size": workload.global_batch_size,
        "train_micro_batch_size_per_gpu": workload.micro_batch_size,
        "gradient_accumulation_steps": workload.num_micro_batches // num_replicas,
        "zero_optimization": {"stage": zero_stage, "overlap_comm": True},
        "bf16": {"enabled": workload.policy == "bf16"},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }


def endless_batches(workload: Workload) -> Iterator[MicroBatch]:
    step = 0
    while True:
        yield from micro_batches(workload, step)
        step += 1


if __name__ == "__main__":
    main()
