"""The configuration's section `run`, and its rules."""

from __future__ import annotations

from collections.abc import Iterator
from os.path import isdir
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from parallel3d.config.rule import excludes, rule, without_credentials
from parallel3d.config.sections.section import Section, expand_home
from parallel3d.errors import Problem


class RunConfig(Section):
    """One training run."""

    resume: str = "never"
    """never: start from step 1. auto: resume from the newest intact checkpoint in this run's folder, if there is one;
    damaged ones are reported and skipped; with checkpoint.upload, from the newest one there if that is newer. Otherwise
    the path of a checkpoint, or an address: of one, or of a target of uploads for its newest. The layout may differ
    from the saved one; model, seed, data and batch.global_batch_size may not."""
    initialize_from: str | None = None
    """Folder with the initial weights: a Hugging Face folder of a family that `convert` reads (docs/checkpoints.md), or
    a checkpoint, of which only the weights are read; or the address of a checkpoint, or of a target of uploads for its
    newest. The section model must match it. A checkpoint to resume from takes precedence. Null: random weights, derived
    from seed."""
    directory: str | None = None
    """Folder for logs, metrics and checkpoints. Null: runs/<name of the configuration file>."""
    num_steps: PositiveInt | None = None
    """Steps of the run. Null: as many as run.num_tokens takes. If both are set, the run ends at whichever comes
    first."""
    num_tokens: PositiveInt | None = None
    """Tokens to train on: the run ends with the step that reaches them. Null: run.num_steps alone decides."""
    seed: NonNegativeInt = 1234
    """Seed of the initial weights, the order of the data and all noise."""
    threads_per_rank: PositiveInt | None = None
    """CPU threads of each rank. Null: the machine's cores divided by its ranks; 1 if precision.sums is exact, so that
    results don't depend on the layout."""
    evaluate_every: PositiveInt | None = None
    """Steps between two evaluations. Null: evaluate_share decides."""
    evaluate_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Instead of evaluate_every: evaluate whenever it takes at most this share of the time since the last evaluation.
    Null: by steps, or not before the end."""
    evaluate_at_start: bool = False
    """Also evaluate before the first step."""
    evaluate_at_end: bool = True
    """Evaluate after the last step. If false, and evaluate_every and evaluate_share are null, there is no
    evaluation."""
    evaluate_batches: PositiveInt = 4
    """Global batches of one evaluation."""
    show_routes: bool = False
    """Print which replica processes which micro-batch, at the start and after each change of membership."""
    device: Literal["auto", "cpu", "cuda", "cuda_shared"] = "auto"
    """cuda: one GPU per rank, with NCCL. cuda_shared: the ranks of a machine share its GPUs and communicate with gloo
    through host memory; for tests. auto: cuda if there is a GPU for every rank of a machine, otherwise cpu; all
    machines must be alike."""
    p2p: Literal["auto", "host", "nccl"] = "auto"
    """How neighbouring stages send each other activations and gradients. host: through host memory and sockets. nccl:
    from GPU to GPU, with headers and all other messages on the host; not with data.document_mask, whose marks the host
    reads. auto: nccl where each rank has a GPU of its own, unless there is a document mask. Not yet run on several
    GPUs."""
    exchange: Literal["auto", "gloo"] = "auto"
    """Transport on CPUs of tensor-parallel sums and gathers, and of gradients and weights between replicas. auto:
    through shared memory where the ranks of a group are processes of one host that has a C compiler, else gloo. The
    same bits for two ranks; sums of more are added in another order unless precision.sums is exact."""
    compile: Literal["never", "elementwise"] = "never"
    """elementwise: torch.compile makes one kernel each of RMSNorm, rotary positions and SwiGLU, forward and backward.
    The first step takes some 20 s longer in the first run, and 2 s a process in later ones, which find the kernels in
    data.cache_directory. Needs a C++ compiler on CPUs, and changes last bits. No effect on gpt2, and where run.kernels
    is triton or c."""
    kernels: Literal["auto", "torch", "triton", "c"] = "auto"
    """Form of all computations but matrix products and attention. torch: operators of torch, the definition. triton:
    fused kernels for GPUs; the update, its rounding and dropout give the same bits as torch, the others are as exact.
    c: loops in C for CPUs, compiled when first used, for both norms, rotary positions, SwiGLU, the cross-entropy and
    attention by blocks, in bf16 and fp32; as exact as torch. auto: triton on a GPU where it is installed; on CPUs c if
    the first rank's machine has a C compiler (all must have one then), recorded and kept as with cpu_gemm; torch
    otherwise, with precision.sums exact and with run.compile elementwise."""
    cpu_gemm: Literal["auto", "mkl", "onednn", "widened"] = "auto"
    """Library for the products of a run on CPUs: mkl or onednn for those in fp32; widened for those in bf16, whose
    factors are widened to fp32 then, as is best on processors without instructions for bf16. auto: the first rank times
    mkl and onednn at the run's costliest shape when the run starts (about 0.3 s), and all ranks use the faster one for
    forward products and for either gradient; environment.json and checkpoints record it, and a resumed run keeps it.
    With precision.sums exact auto means onednn, so that no measurement decides a bit. In bf16, where the first rank has
    AMX, it times oneDNN against a loop of our own ("tiles") for weight gradients; a host without AMX takes oneDNN in
    its place. In bf16, where the first rank has no instructions for it, auto means widened."""
    cpu_attention: Literal["auto", "sdpa", "blocks"] = "auto"
    """Attention of a run on CPUs. sdpa: torch's own kernel. blocks: matrix products over blocks of queries, as exact;
    not for documents kept apart, which take sdpa. auto: the faster one at the run's shape, measured, recorded and kept
    as with cpu_gemm; with precision.sums exact, or in fp64, sdpa. A sliding window of 256 keys or more that hides
    something takes blocks, a smaller one sdpa, whatever stands here."""
    deterministic: bool = False
    """Use kernels that give the same bits each time they run on the same GPU. With precision.sums exact, a run with
    losses, or a resumed one, is then bitwise the undisturbed one on a GPU too. Costs speed, mostly in attention's
    backward pass. No effect on CPUs, which give the same bits anyway."""
    timeout_s: PositiveFloat = 600.0
    """Longest wait for another rank, in seconds."""


@rule("run.num_steps", "run.num_tokens")
def check_length(num_steps: int | None, num_tokens: int | None) -> Iterator[Problem]:
    """The run has an end."""
    if num_steps is None and num_tokens is None:
        rule_text = "is required if run.num_tokens is null: one of them ends the run"
        yield Problem(
            field="run.num_steps", value=None, rule=rule_text, fix="Set either, or both: the first one reached"
        )


@rule("run.p2p", "run.device", "data.document_mask")
def check_p2p(p2p: str, device: str, document_mask: bool) -> Iterator[Problem]:
    """Messages from GPU to GPU need a GPU for each rank, and nothing in them that the host reads."""
    if p2p != "nccl":
        return
    if device in ("cpu", "cuda_shared"):
        yield excludes("run.p2p", p2p, "run.device", device, "NCCL needs a GPU for each rank")
    if document_mask:
        yield excludes("run.p2p", p2p, "data.document_mask", document_mask, "the host reads where documents begin")


@rule("run.resume")
def check_resume(resume: str) -> Iterator[Problem]:
    """The checkpoint to resume from is a folder."""
    if "://" in resume:
        yield from without_credentials("run.resume", resume, query=False)
    elif resume not in ("never", "auto") and not isdir(expand_home(resume)):
        yield Problem(
            field="run.resume",
            value=resume,
            rule=f"must be never, auto or a directory (relative to {Path.cwd()})",
            fix="Give the path of a checkpoint, such as runs/NAME/checkpoints/latest",
        )


@rule("run.initialize_from")
def check_initialize_from(folder: str | None) -> Iterator[Problem]:
    """The initial weights are a folder."""
    if folder is not None and "://" in folder:
        yield from without_credentials("run.initialize_from", folder, query=False)
    elif folder is not None and not isdir(expand_home(folder)):
        yield Problem(
            field="run.initialize_from",
            value=folder,
            rule=f"is not a directory (relative to {Path.cwd()})",
            fix="Give a Hugging Face folder or a checkpoint, or remove it to start from random weights",
        )


@rule("run.evaluate_every", "run.evaluate_share")
def check_evaluations(every: int | None, share: float | None) -> Iterator[Problem]:
    """Evaluations come by time or by steps."""
    if every is not None and share is not None:
        yield excludes("run.evaluate_share", share, "run.evaluate_every", every, "evaluations come by time or by steps")
