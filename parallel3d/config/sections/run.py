"""The configuration's section `run`, and its rules."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from parallel3d.config.sections.base import Section


class RunConfig(Section):
    """One training run."""

    resume: str = "never"
    """never: from the start. auto: from the newest good checkpoint of this run's folder, if there is one; damaged ones
    are named and passed over. Else the path of a checkpoint. The layout may be another one; model, seed, text and
    batch.global_batch_size may not."""

    initialize_from: str | None = None
    """Folder of the weights to begin with: a Hugging Face folder (Llama, Qwen2, GPT-2) or a checkpoint, of which the
    weights alone are read. The section model must be theirs. A checkpoint that the run goes on from (resume) comes
    first. Null: random weights, keyed by seed."""
    directory: str | None = None
    """Folder of logs, metrics and checkpoints. Null: runs/<name of the configuration file>."""
    num_steps: PositiveInt | None = None
    """Iterations of the run. Null: as many as run.num_tokens takes. With both, the first that is reached ends it."""
    num_tokens: PositiveInt | None = None
    """Tokens to train on: the run ends with the step that reaches them. Null: run.num_steps alone decides."""
    seed: NonNegativeInt = 1234
    """Keys the initial weights, the order of the data and all noise."""
    threads_per_rank: PositiveInt | None = None
    """CPU threads of each rank. Null: the machine's cores shared out over its ranks; 1 with precision.sums exact, where
    the layout must not decide."""
    evaluate_every: PositiveInt | None = None
    """Steps between two evaluations. Null: as evaluate_share says."""
    evaluate_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """In place of evaluate_every: evaluate whenever it takes at most this share of the time since the last evaluation.
    Null: by steps, or not before the end."""
    evaluate_at_start: bool = False
    """Evaluate before the first step, too."""
    evaluate_at_end: bool = True
    """Evaluate after the last step. false, with evaluate_every and evaluate_share null: no evaluation at all."""
    evaluate_batches: PositiveInt = 4
    """Global batches of one evaluation."""
    show_routes: bool = False
    """Print who handles which micro-batch, at the start and after each change of membership."""
    device: Literal["auto", "cpu", "cuda", "cuda_shared"] = "auto"
    """cuda: a GPU for each rank, and NCCL. cuda_shared: the ranks of a machine share its GPUs, and gloo works on copies
    in the host's memory: for tests. auto: cuda if every rank of a machine can have a GPU, else cpu; all machines must
    be alike."""
    compile: Literal["never", "elementwise"] = "never"
    """elementwise: RMSNorm, rotary positions and SwiGLU become one kernel each, forward and backward: torch.compile
    makes them in the first step, in some seconds, on CPUs with a C++ compiler. Changes last bits. GPT-2 has none."""
    timeout_s: PositiveFloat = 600.0
    """Longest wait for a peer, in seconds."""
