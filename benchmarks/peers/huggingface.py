"""Hugging Face transformers' Llama in the plain loop: alone, or over two replicas in torch's DDP."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.peers.llama import mean_loss
from benchmarks.peers.steps import report_steps
from benchmarks.peers.training import accumulate, adamw, micro_batches, parse_arguments
from benchmarks.peers.workload import Workload


def main() -> None:
    workload, options = parse_arguments(__doc__, kinds=("single", "ddp"))
    model: nn.Module = build_model(workload)
    rank, num_ranks = 0, 1
    if options.kind == "ddp":
        dist.init_process_group("gloo")
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = adamw(list(model.parameters()))

    def sync(is_last: bool) -> None:
        model.require_backward_grad_sync = is_last  # DDP's no_sync(): gradients travel with the last micro-batch

    def run_step(step: int) -> float:
        batches = micro_batches(workload, step, rank, num_ranks)
        loss = accumulate(workload, batches, lambda ids, targets: mean_loss(model(input_ids=ids).logits, targets), sync)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss

    report_steps(options.steps, run_step)
    if num_ranks > 1:
        dist.destroy_process_group()


def build_model(workload: Workload) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=workload.vocab_size,
            hidden_size=workload.hidden_size,
            intermediate_size=workload.intermediate_size,
            num_hidden_layers=workload.num_hidden_layers,
            num_attention_heads=workload.num_attention_heads,
            num_key_value_heads=workload.num_attention_heads,
            max_position_embeddings=workload.sequence_length,
            tie_word_embeddings=False,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )


if __name__ == "__main__":
    main()
