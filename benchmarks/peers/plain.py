"""The plain PyTorch loop, as one writes it by hand: one process, fused AdamW, no framework."""

from __future__ import annotations

from benchmarks.peers.llama import build_llama, mean_loss
from benchmarks.peers.steps import report_steps
from benchmarks.peers.training import accumulate, adamw, micro_batches, parse_arguments


def main() -> None:
    workload, options = parse_arguments(__doc__)
    model = build_llama(workload)
    optimizer = adamw(list(model.parameters()))

    def run_step(step: int) -> float:
        batches = micro_batches(workload, step)
        loss = accumulate(workload, batches, lambda ids, targets: mean_loss(model(ids), targets))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss

    report_steps(options.steps, run_step)


if __name__ == "__main__":
    main()
