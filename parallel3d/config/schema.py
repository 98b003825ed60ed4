"""The configuration: every field with its type, range, unit and what else it constrains.

Types are strict (no "8" for 8), unknown fields are errors, objects are frozen. What a field may be on its own is said
here; rules between fields live in rules.py, sizes that follow from fields in derived.py. The docstrings below are the
reference: they are carried into the JSON schema that editors read, which `python -m parallel3d.config.schema` prints.

A field that may be null says what null stands for; `load.resolve` fills in what can be derived.
"""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from parallel3d.config.data import DataConfig
from parallel3d.config.monitor import MonitorConfig
from parallel3d.config.restart import RestartConfig
from parallel3d.config.section import Fraction, Section
from parallel3d.config.warmup import CurriculumLearning, WarmupConfig

CountPerStage = Annotated[list[PositiveInt], Field(min_length=1)]
"""One number for each pipeline stage, or virtual stage."""


FaultPhase = Literal[
    "load",
    "forward",
    "send",
    "backward",
    "reduce_scatter",
    "backup",
    "all_reduce",
    "update",
    "all_gather",
    "evaluate",
    "recovery_report",
    "recovery_moves",
    "recovery_confirm",
    "recovery_groups",
]
"""Where a fault can be injected."""


class ModelConfig(Section):
    """The decoder's shape; fields are named as in Hugging Face configurations."""

    architecture: Literal["llama", "gpt2"] = "llama"
    """Family of the model. llama: RMSNorm, rotary positions, SwiGLU, no biases. gpt2: LayerNorm, learned positions, an
    MLP with GELU, biases. Both normalise before each block and know grouped-query attention."""
    vocab_size: PositiveInt
    """Rows of the embedding and of the output head, padded where parallel.tp_size does not divide it; at least
    data.tokenizer.vocab_size."""
    hidden_size: PositiveInt
    """Width of the residual stream; num_attention_heads times the head size, which llama wants even."""
    intermediate_size: PositiveInt
    """Inner width of the MLP; a multiple of parallel.tp_size."""
    num_hidden_layers: PositiveInt
    """Number of decoder layers; at least parallel.pp_size."""
    num_attention_heads: PositiveInt
    """Query heads; divides hidden_size; a multiple of parallel.tp_size and of num_key_value_heads."""
    num_key_value_heads: PositiveInt | None = None
    """Key and value heads, each shared by a group of query heads; a multiple of parallel.tp_size, or a divisor: then
    several ranks hold copies of a head. Null: one per query head."""
    tie_word_embeddings: bool = False
    """The output head uses the embedding's matrix: one parameter, held by the first and by the last pipeline stage."""
    qkv_bias: bool | None = None
    """Biases on the query, key and value projections. Null: true for gpt2, false for llama."""
    max_position_embeddings: PositiveInt | None = None
    """The longest sequence; gpt2 learns so many positions. Null: batch.sequence_length."""
    rms_norm_eps: PositiveFloat = 1e-5
    """Added to the mean square inside llama's RMSNorm."""
    rope_theta: PositiveFloat = 10000.0
    """Base of llama's rotary frequencies."""
    layer_norm_eps: PositiveFloat = 1e-5
    """Added to the variance inside gpt2's LayerNorm."""
    norm_backend: Literal["torch", "apex", "auto"] = "torch"
    """What runs the norms: ours in torch, or NVIDIA apex's fused ones (CUDA; never run yet). auto: apex where it is
    installed."""
    activation_function: Literal["gelu_new", "gelu"] | None = None
    """Of gpt2's MLP: GELU in the form with tanh (gelu_new) or the exact one (gelu). Null: gelu_new."""
    hidden_dropout: Fraction = 0.0
    """Probability of dropping an element after the embedding, the attention output and the MLP output."""
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of the initial weights."""
    initializer_depth_scaling: Literal["none", "layer_index", "num_layers"] = "none"
    """Scales the initial output projections of attention and MLP: layer_index by 1/sqrt(2 l), l the 1-based layer index
    (HLAT's paper); num_layers by 1/sqrt(2 L) in every layer (HLAT's code)."""


class ParallelConfig(Section):
    """How the model, its layers and the batch are spread over ranks."""

    tp_size: PositiveInt = 1
    """Ranks that share each layer (tensor parallel); divides heads and intermediate_size."""
    pp_size: PositiveInt = 1
    """Pipeline stages; at most model.num_hidden_layers."""
    dp_size: PositiveInt | None = None
    """Replicas of every stage. Null: what the number of ranks leaves, world / (tp_size * pp_size); 1 if nobody says how
    many ranks there are. Excludes stage_replicas."""
    stage_replicas: CountPerStage | None = None
    """Replicas of each stage where they differ, one number a stage. Null: dp_size everywhere. Excludes dp_size."""
    order: Literal["pp_dp_tp", "dp_pp_tp"] = "pp_dp_tp"
    """Axes of the rank grid, slowest first. pp_dp_tp keeps a stage's replicas together (HLAT's); dp_pp_tp keeps whole
    pipelines together, so that a lost host takes one pipeline."""
    sequence_parallel: bool = False
    """Norms and dropout work on sequence shards over the tensor-parallel ranks; batch.sequence_length becomes a
    multiple of tp_size. Without effect at tp_size 1."""
    schedule: Literal["1f1b", "gpipe", "interleaved", "zb-h1"] = "1f1b"
    """Order of the micro-batches in a pipeline: 1f1b (PipeDream-flush) holds the activations of at most pp_size, gpipe
    of all; zb-h1 (zero bubble) holds pp_size on every stage and splits the backward pass: a third of 1f1b's bubble.
    interleaved gives each stage virtual_stages chunks of layers: 1f1b's bubble by that number, for as many more
    messages and some more activations; best where pp_size divides the micro-batches of a replica."""
    virtual_stages: PositiveInt = 1
    """Chunks of layers on each stage: at least 2 for schedule interleaved, 1 for the others. pp_size * virtual_stages
    is at most model.num_hidden_layers. Chunk c of stage p is the (c * pp_size + p)-th in the order of layers."""
    split_backward: Literal["auto", "never"] = "auto"
    """auto: where replicas were lost the backward pass is split, gradients of inputs first, if that makes the iteration
    shorter. never: only schedule zb-h1 splits it."""
    max_extra_in_flight: NonNegativeInt = 2
    """Micro-batches that a replica may hold above its schedule's limit where replicas were lost: that many more
    activations of its stage (or chunk). Without effect on gpipe."""
    layers_per_stage: CountPerStage | None = None
    """Layers of each stage, summing to model.num_hidden_layers; with virtual stages pp_size * virtual_stages numbers,
    in the order of layers. Null: cut so that the costliest stage is cheapest."""
    zero_stage: Literal[0, 1] = 1
    """1 shards the optimizer's state over the replicas of a stage (ZeRO-1); 0 keeps all of it on each."""
    overlap_grad_reduce: bool = True
    """Reduce the gradients of a bucket while the backward pass still runs."""
    overlap_param_gather: bool = True
    """Gather the updated parameters while the next forward pass already runs. Without effect at zero_stage 0."""
    bucket_mib: PositiveFloat = 16.0
    """Size of a gradient bucket, in MiB of main gradients."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What a layer recomputes in the backward pass to keep less until then: selective keeps its matrix products and
    attention, full only its input. Neither changes a number. Where the backward pass is split (zb-h1), what its second
    half needs is kept from the first half on, all the same."""
    p2p_slots: PositiveInt = 3
    """Messages in flight between two stages' replicas, per ordered pair."""


class BatchConfig(Section):
    """Sizes of an iteration: give two of the three sizes, the third follows from
    global_batch_size = micro_batch_size * num_micro_batches."""

    global_batch_size: PositiveInt | None = None
    """Sequences of one iteration, over all replicas."""
    micro_batch_size: PositiveInt | None = None
    """Sequences that a replica runs at once."""
    num_micro_batches: PositiveInt | None = None
    """Micro-batches of one iteration, counted over all replicas; at least as many as the replicas of any stage."""
    sequence_length: PositiveInt
    """Tokens of a sequence."""


class LossScaleConfig(Section):
    """The factor on the gradients of the mean loss that keeps them within fp16's range; all are powers of two."""

    initial: PositiveFloat = 65536.0
    """Scale of the first step; at least min."""
    growth_interval: PositiveInt | None = 2000
    """Steps in a row without infinity or NaN after which the scale grows. Null: the scale stays as it is."""
    growth_factor: PositiveFloat = 2.0
    """Times the scale when it grows; at least 1."""
    backoff_factor: PositiveFloat = 0.5
    """Times the scale when a gradient was not finite, which also skips that step's update; at most 1."""
    min: PositiveFloat = 1.0
    """The scale never becomes smaller."""


class PrecisionConfig(Section):
    """Number formats."""

    sums: Literal["float", "exact"] = "float"
    """exact: gradients, losses and squares of micro-batches are added as 64-bit integers, in any order with the same
    bits, so that neither the layout nor a failure changes the run. 8 bytes a parameter more, and slower."""
    policy: Literal["fp32", "fp64", "fp16", "bf16", "bf16_sr", "bf16_pure"] = "fp32"
    """fp32; fp64 (for tests); fp16, bf16: 16-bit compute with fp32 main gradients, master weights and moments; bf16_sr:
    weights, gradients and moments in bf16, updates rounded stochastically; bf16_pure: the same, rounded to the nearest,
    which loses small updates (for comparisons)."""
    stochastic_rounding: list[Literal["update", "accumulation", "outputs"]] = []
    """What policy bf16_sr rounds stochastically beside the update, which it always does: accumulation, each
    micro-batch's gradients as they are added; outputs, those of the linear layers in training. Slow: to try out what
    hardware does that rounds so everywhere."""
    loss_scale: LossScaleConfig = LossScaleConfig()
    """How policy fp16 scales gradients; without effect on the others."""


class OptimizerConfig(Section):
    """AdamW."""

    backend: Literal["torch", "apex", "auto"] = "torch"
    """What runs the update: torch's fused kernel, or NVIDIA apex's FusedAdam (CUDA; precision.policy fp32, fp16 or
    bf16; never run yet). auto: apex where it is installed and fits."""
    learning_rate: PositiveFloat
    """Peak learning rate; `lr_schedule` says how it is reached and left."""
    beta1: Fraction = 0.9
    """Decay of the first moment, per update."""
    beta2: Fraction = 0.95
    """Decay of the second moment, per update."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay, multiplied by the learning rate."""
    decay_norms_and_biases: bool = False
    """Apply the weight decay to norm weights and biases too (HLAT's runs did)."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Gradients are scaled down to this global norm. Null: no clipping."""


class LrScheduleConfig(Section):
    """The learning rate: linear warmup, a plateau, decay; by updates or by tokens trained."""

    kind: Literal["constant", "linear", "cosine", "1-sqrt"] = "cosine"
    """Shape after the warmup and the plateau. linear and 1-sqrt with a plateau_ratio are WSD (warmup-stable-decay)."""
    warmup_steps: NonNegativeInt = 0
    """Updates of linear warmup from 0; at most decay_steps, where that is given. Excludes warmup_tokens."""
    warmup_tokens: PositiveInt | None = None
    """The same in tokens trained (GPT-3's way); at most decay_tokens, where that is given. Null: warmup_steps."""
    plateau_ratio: Fraction = 0.0
    """Share of what lies between the warmup and the end of the decay that is spent at the peak."""
    decay_steps: PositiveInt | None = None
    """Update at which the decay ends, counted from the run's start, warmup included. Excludes decay_tokens. Null: the
    run's last step, where decay_tokens is null too."""
    decay_tokens: PositiveInt | None = None
    """The same in tokens trained: the learning rate then depends on them alone, whatever the lengths of sequences or
    batches were. Null: decay_steps."""
    min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Lowest learning rate after the warmup, as a share of the peak."""
    decay_form: Literal["floor", "clamp"] = "floor"
    """floor: decays from 1 to min_ratio; clamp: decays from 1 to 0 but stops at min_ratio (HLAT's)."""


class TimeoutConfig(Section):
    """A timeout that follows the network: multiplier x measured round trip, held between two bounds
    (FlexiTrain: 25,000 x the mean time of a small all-reduce)."""

    multiplier: PositiveFloat
    """Times the measured round trip of a small all-reduce."""
    min_s: PositiveFloat
    """Never shorter, in seconds."""
    max_s: PositiveFloat
    """Never longer, in seconds; at least min_s."""


class HeartbeatTimeoutConfig(TimeoutConfig):
    """How long a worker may be without a sign of life."""

    multiplier: PositiveFloat = 100.0
    """Times the measured round trip of a small all-reduce."""
    min_s: PositiveFloat = 0.5
    """Never shorter, in seconds."""
    max_s: PositiveFloat = 5.0
    """Never longer, in seconds; at least min_s."""


class WatchdogTimeoutConfig(TimeoutConfig):
    """How long a worker may be alive without getting on."""

    multiplier: PositiveFloat = 100_000.0
    """Times the measured round trip of a small all-reduce."""
    min_s: PositiveFloat = 60.0
    """Never shorter, in seconds."""
    max_s: PositiveFloat = 600.0
    """Never longer, in seconds; at least min_s."""


class FaultConfig(Section):
    """One fault to inject, for tests and demonstrations: it really happens."""

    rank: NonNegativeInt
    """The worker that it happens to."""
    step: PositiveInt
    """The step in which it happens; for evaluation: the step after which it is held."""
    phase: FaultPhase = "forward"
    """Where in the step. send: between a send to the next stage and the receive that follows; recovery_*: at that
    point of the first recovery from step - 1 on."""
    kind: Literal["kill", "stop", "term", "sleep", "flip", "nan"] = "kill"
    """kill: SIGKILL; stop: SIGSTOP, a hang; term: SIGTERM, an announced departure; sleep: goes on `seconds` later;
    flip: one bit of its first weight is the other way, as by a broken memory; nan: its first weight is no number, and
    the run diverges."""
    attempt: NonNegativeInt = 0
    """In which start of the run it happens: 0 is the first, n the one after the n-th restart."""
    seconds: NonNegativeFloat = 1.0
    """How long a sleep lasts."""


class RandomFaults(Section):
    """Faults drawn for every (step, rank): the same in every process."""

    probability: Fraction = 0.0
    """That a rank has a fault in a step."""
    seed: NonNegativeInt = 0
    """Keys the draw."""
    max_faults: PositiveInt = 1
    """At most so many in a start of the run; after a restart others are drawn."""
    kind: Literal["kill", "stop", "term"] = "kill"
    """kill: SIGKILL; stop: SIGSTOP, a hang; term: SIGTERM, an announced departure."""


class ElasticConfig(Section):
    """What happens when workers die."""

    enabled: bool = True
    """Go on without lost workers, with the same mathematics. false: the first loss ends the run."""
    zero_backups: Literal[0, 1] = 1
    """Copies of every range of optimizer state on another replica of its stage, kept up by updating it there too:
    optimizer memory and update work x 2. 0: under zero_stage 1 the loss of any worker loses its range and ends the run.
    Without effect at zero_stage 0."""
    heartbeat_timeout: HeartbeatTimeoutConfig = HeartbeatTimeoutConfig()
    """How long a worker may be without a sign of life before its guardian kills it."""
    watchdog_timeout: WatchdogTimeoutConfig = WatchdogTimeoutConfig()
    """How long a worker may be alive without getting on, while it waits for nobody, before its guardian kills it."""
    witness: str | None = None
    """A file on a folder that all hosts share: of two halves of the hosts that can't reach each other, the one that
    locks it goes on. Null: a half that has lost the coordinator's host stops."""
    faults: list[FaultConfig] = []
    """Faults to inject, each {"rank", "step", "phase", "kind"}."""
    random_faults: RandomFaults = RandomFaults()
    """Faults to draw and inject beside them."""


class CheckpointConfig(Section):
    """What a run keeps of itself on disk. Saves are written while training goes on; each is complete or not there."""

    every: PositiveInt | None = None
    """Steps between two saves. One that comes while another is still being written is skipped. Null: none."""
    save_at_end: bool = True
    """Save after the last step, and after a stop (Ctrl-C, SIGTERM), before the workers end. With `every` a stop saves
    in any case."""
    retry_s: list[PositiveFloat] = [1.0, 10.0, 60.0, 300.0]
    """Seconds after which the save at the end of a run is tried again when it has failed, one try each: time to make
    room on a full disk. A stop (Ctrl-C, SIGTERM) cuts the waits short."""
    keep_last: PositiveInt = 2
    """So many of the newest checkpoints are kept, and the one with the lowest loss."""
    keep_every: PositiveInt | None = None
    """Steps that are a multiple of this are saved, too, and their checkpoints kept for ever. Null: none."""
    keep_every_weights_only: bool = False
    """Of those that are kept for ever only the weights are, once they are neither the best nor among the last: a third
    of the bytes. A new run can begin from them, none can go on."""
    write_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of the time in which a rank writes, while training goes on. Less: training is slowed less, but for longer;
    1: no breaks, for machines whose CPUs have nothing else to do."""
    directory: str | None = None
    """Folder of the checkpoints; on several hosts one that all share. Null: checkpoints in the run's folder."""


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


class ProfileConfig(Section):
    """Traces by torch's profiler."""

    steps: list[PositiveInt] = []
    """First and last step to record: one trace for all of them. Empty: none."""
    ranks: list[NonNegativeInt] = [0]
    """Ranks that record; each writes profile/rank-N.json into the run's folder, for chrome://tracing or Perfetto."""


class DumpConfig(Section):
    """Tensors of single steps as files."""

    steps: list[PositiveInt] = []
    """Steps to dump: weights, activations, their gradients, gradients of parameters. Empty: none."""
    names: Annotated[list[str], Field(min_length=1)] = ["*"]
    """Globs of what to dump, such as "layers.3.*" or "*.grad": NAME.input and NAME.output of every module, each with
    its .grad, head.logits, and parameters by their names. Each rank holds what it dumps until the step's end."""
    directory: str | None = None
    """Folder of the dumps. Null: dumps in the run's folder."""


class DebugConfig(Section):
    """Aids for the case that something is wrong."""

    dump_tensors: DumpConfig = DumpConfig()
    """Tensors of single steps as files, for launch/compare_dumps.py."""

    replica_check_every: PositiveInt | None = None
    """Steps between two checks that all copies are the same bits: weights of a stage's replicas, weights that all
    tensor-parallel ranks hold, optimizer state of an owner and its backup. Null: never."""
    replica_check_action: Literal["stop", "warn"] = "stop"
    """What a copy that differs leads to: stop ends the run with exit code 5, warn says so at every check."""
    profile: ProfileConfig = ProfileConfig()
    """Traces by torch's profiler."""
    slow_step_factor: PositiveFloat | None = 10.0
    """A step that takes so many times the median of the steps before is overdue: a table says where every rank is and
    whom it waits for, and each writes its stacks into its log. The run goes on. Null: never."""
    slow_step_min_s: PositiveFloat = 30.0
    """No step is overdue before so many seconds; ten times as long before the third step and while evaluating."""


class Config(Section):
    """A training run: model, layout, batch, optimizer, data."""

    description: str = ""
    """What this configuration is, and for how many devices."""
    source: str = ""
    """Where its numbers come from."""
    model: ModelConfig
    """The decoder's shape."""
    parallel: ParallelConfig = ParallelConfig()
    """How the model, its layers and the batch are spread over ranks."""
    batch: BatchConfig
    """Sizes of an iteration."""
    precision: PrecisionConfig = PrecisionConfig()
    """Number formats."""
    optimizer: OptimizerConfig
    """AdamW."""
    lr_schedule: LrScheduleConfig = LrScheduleConfig()
    """The learning rate over the updates."""
    warmup: WarmupConfig = WarmupConfig()
    """Steps that are smaller at first: shorter sequences, or fewer."""
    curriculum_learning: CurriculumLearning = CurriculumLearning()
    """DeepSpeed's block as it stands in its configuration, in place of warmup.sequence_length."""
    data: DataConfig = DataConfig()
    """The text to train on."""
    elastic: ElasticConfig = ElasticConfig()
    """What happens when workers die."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What a run keeps of itself on disk."""
    monitor: MonitorConfig = MonitorConfig()
    """What is recorded of a run's course, and what ends a run that has diverged."""
    restart: RestartConfig = RestartConfig()
    """What happens when a run can't go on in place."""
    debug: DebugConfig = DebugConfig()
    """Aids for the case that something is wrong; all that cost anything are off."""
    run: RunConfig
    """Length, seed, folder and devices of the run."""


def json_schema() -> str:
    """The JSON schema that editors complete and check configurations with; a file names it in its `$schema`."""
    schema = Config.model_json_schema()
    schema["properties"] = {"$schema": {"type": "string", "description": "This schema's path."}} | schema["properties"]
    return json.dumps(schema, indent=2) + "\n"


if __name__ == "__main__":
    print(json_schema(), end="")
