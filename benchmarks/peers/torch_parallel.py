"""torch's own parallelism on the plain Llama, combined as in torchtitan, on two ranks.

fsdp: fully_shard, parameters gathered once a step (its closest equivalent of ZeRO-1). tp: parallelize_module with
sequence parallelism and a vocabulary-parallel loss. pp: torch.distributed.pipelining's 1F1B.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.peers.llama import build_llama, mean_loss
from benchmarks.peers.steps import report_steps
from benchmarks.peers.training import accumulate, adamw, autocast, global_batch, micro_batches, parse_arguments
from benchmarks.peers.workload import Workload
from parallel3d.pipeline.partition import model_costs, partition_layers


def main() -> None:
    workload, options = parse_arguments(__doc__, kinds=("fsdp", "tp", "pp"))
    dist.init_process_group("gloo")
    {"fsdp": run_fsdp, "tp": run_tp, "pp": run_pp}[options.kind](workload, options.steps)
    dist.destroy_process_group()


def run_fsdp(workload: Workload, num_steps: int) -> None:
    model = build_llama(workload)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
    optimizer = adamw(list(model.parameters()))

    def sync(is_last: bool) -> None:
        model.set_requires_gradient_sync(is_last)
        model.set_reshard_after_backward(is_last)

    def run_step(step: int) -> float:
        batches = micro_batches(workload, step, dist.get_rank(), dist.get_world_size())
        loss = accumulate(workload, batches, lambda ids, targets: mean_loss(model(ids), targets), sync)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    report_steps(num_steps, run_step)


def run_tp(workload: Workload, num_steps: int) -> None:
    model = build_llama(workload)
    parallelize(model)
    optimizer = adamw(list(model.parameters()))

    def run_step(step: int) -> float:
        with loss_parallel():
            loss = accumulate(
                workload, micro_batches(workload, step), lambda ids, targets: mean_loss(model(ids), targets)
            )
        optimizer.step()
        optimizer.zero_grad()
        return loss

    report_steps(num_steps, run_step)


def parallelize(model: nn.Sequential) -> None:
    """Cuts weights over the ranks; between the products, activations are cut along the sequence."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    layer_plan = {
        "attention_norm": SequenceParallel(),
        "attention": whole,
        "attention.qkv": ColwiseParallel(),
        "attention.output": RowwiseParallel(output_layouts=Shard(1)),
        "mlp_norm": SequenceParallel(),
        "mlp": whole,
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    embedding, *layers, head = model
    parallelize_module(embedding, mesh, RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)))
    for layer in layers:
        parallelize_module(layer, mesh, layer_plan)
    logits = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(head, mesh, {"norm": SequenceParallel(), "projection": logits})


def run_pp(workload: Workload, num_steps: int) -> None:
    rank, num_stages = dist.get_rank(), dist.get_world_size()
    model = build_llama(workload, partition(workload, num_stages)[rank])
    stage = PipelineStage(model, rank, num_stages, torch.device("cpu"))
    schedule = Schedule1F1B(stage, workload.num_micro_batches, loss_fn=mean_loss)
    optimizer = adamw(list(model.parameters()))
    is_first, is_last = rank == 0, rank == num_stages - 1

    def run_step(step: int) -> float:
        ids, targets = global_batch(workload, step)
        losses: list[torch.Tensor] = []
        with autocast(workload):
            schedule.step(*([ids] if is_first else []), **({"target": targets, "losses": losses} if is_last else {}))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        loss = torch.stack(losses).mean().detach() if is_last else torch.zeros(())
        dist.broadcast(loss, src=num_stages - 1)
        return loss.item()

    report_steps(num_steps, run_step)


def partition(workload: Workload, num_stages: int) -> tuple[range, ...]:
    """The layers of each stage, cut where parallel3d cuts them."""
    costs = model_costs(
        hidden_size=workload.hidden_size,
        intermediate_size=workload.intermediate_size,
        num_attention_heads=workload.num_attention_heads,
        num_key_value_heads=workload.num_attention_heads,
        vocab_size=workload.vocab_size,
        sequence_length=workload.sequence_length,
    )
    return partition_layers([costs.layer] * workload.num_hidden_layers, num_stages, costs.embedding, costs.head)


if __name__ == "__main__":
    main()
