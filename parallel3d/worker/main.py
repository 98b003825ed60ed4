"""What a worker process does: open the text, meet the others, build its rank, train, tell."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from parallel3d.checkpoint.directory import CheckpointDirectory
from parallel3d.config.derived import num_parameters, save_intervals, warnings
from parallel3d.config.schema import Config
from parallel3d.config.warmup_builder import describe_warmup, num_steps
from parallel3d.data.build import (
    build_evaluation_lanes,
    build_reader,
    build_reader_processes,
    describe_data,
    fingerprint_data,
    open_run_corpus,
)
from parallel3d.data.corpus import Corpus
from parallel3d.data.prefetch import Prefetcher
from parallel3d.debug.trace import NoTrace, make_trace
from parallel3d.elastic.guardian.heartbeat import Mode
from parallel3d.elastic.guardian.spawn import WorkerContext
from parallel3d.elastic.protocol.membership import Address, GenerationRecord
from parallel3d.elastic.protocol.restart_policy import START_KEY, StartInstruction
from parallel3d.elastic.worker.control_channel import ControlChannel
from parallel3d.elastic.worker.torch_store import ControlStore
from parallel3d.errors import ConfigError, Problem
from parallel3d.layers.init import InitMethod
from parallel3d.monitor.device_peak import find_peak
from parallel3d.monitor.memory import reset_peak_memory
from parallel3d.monitor.run_folder import TRACES
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.gloo_group import GlooGroup
from parallel3d.parallel.group import Group, SoloGroup
from parallel3d.parallel.groups import is_world
from parallel3d.parallel.nccl_group import NCCL_ENVIRONMENT, NcclGroup
from parallel3d.parallel.p2p_sockets import SocketLinks, open_listener
from parallel3d.parallel.staged_group import StagedGroup
from parallel3d.pipeline.instructions import Instruction
from parallel3d.trainer.batching import plan_batch
from parallel3d.trainer.build import MakeStage, RunLanes, prepare_rank
from parallel3d.trainer.checkpointing import AsyncSaver, CheckpointSaver, NoSaver
from parallel3d.trainer.context import RankContext, RankHooks, Transports
from parallel3d.trainer.generation import close_generation
from parallel3d.trainer.loop import Phase, Trainer
from parallel3d.trainer.plans import build_grid
from parallel3d.trainer.recovery import Network, RecoveryManager
from parallel3d.trainer.reporting import describe_layout, describe_start
from parallel3d.trainer.resume import resume, skip_data_to
from parallel3d.worker.faults import FaultInjector, plan_faults

OpenInitialWeights = Callable[[Config], InitMethod | None]
"""Opens the weights that a run starts from; None: random ones."""

WARMUP_STEPS = 2
NUM_ROUND_TRIPS = 20


def run_worker(
    config: Config, context: WorkerContext, *, make_stage: MakeStage, open_initial_weights: OpenInitialWeights
) -> int:
    """Trains as one rank of the run, starting where the coordinator says; returns the worker's exit code.

    `make_stage` builds the rank's layers; `open_initial_weights` opens what `run.initialize_from` names.
    """
    control, token = context.control, context.control.token
    print(f"rank {context.rank} is process {os.getpid()} on {context.host}", flush=True)
    device = choose_device(config, context.local_rank, context.local_world_size)
    init_device(device)
    print(f"computing on {device}; GPUs found: {torch.cuda.device_count()}", flush=True)
    torch.set_num_threads(choose_num_threads(config, context.local_world_size))
    torch.set_flush_denormal(True)
    grid = build_grid(config)
    control.publish({"kind": "hello", "coordinates": str(grid.coordinates(context.rank))})
    start = StartInstruction.from_json(json.loads(control.get(START_KEY, token)))

    def log_notice(line: str) -> None:
        control.publish({"kind": "notice", "text": line})

    if (
        context.rank == grid.ranks[0]
        and config.run.device == "auto"
        and device.type == "cpu"
        and torch.cuda.device_count()
    ):
        log_notice("warning: run.device auto takes the CPU: there are fewer GPUs here than workers")
    corpus = open_run_corpus(config, token, log_notice)
    reader = build_reader(config, corpus)
    prefetcher = Prefetcher(
        reader, config.data.prefetch, token, build_reader_processes(config, corpus, token, log_notice)
    )
    directory = Path(str(config.run.directory)) / TRACES
    trace = make_trace(config.debug.profile, rank=context.rank, directory=directory, device=device)
    phase_hook = WorkerHooks(config, context, trace, attempt=start.attempt)
    rank = prepare_rank(
        config,
        context.rank,
        grid,
        make_stage=make_stage,
        lanes=RunLanes(train=prefetcher, evaluate=build_evaluation_lanes(config, corpus), eos_id=corpus.train.eos_id),
        device=device,
        initial=open_initial_weights(config) if start.checkpoint is None else None,
        hooks=RankHooks(on_instruction=phase_hook.on_instruction, phase_hook=phase_hook.enter_phase, label=trace.label),
    )
    phase_hook.corrupt_weight = lambda kind: corrupt_weight(rank, kind)
    text, total = fingerprint_data(config, corpus), describe_total(config)
    if start.checkpoint is not None:
        for line in resume(rank, Path(start.checkpoint), text):
            if context.rank == grid.ranks[0]:
                log_notice(line)
    if start.data is not None:
        rank.state = skip_data_to(rank.state, start.data)
    train_rank(
        rank,
        context,
        phase_hook,
        saver=build_saver(rank, text, corpus.tokenizer.files if corpus.tokenizer else {}),
        on_generation=lambda record: log_generation(record, rank, corpus, control, total, start),
        data_wait_s=lambda: prefetcher.data_wait_s,
        describe=lambda: describe_run(rank, corpus),
    )
    trace.close()
    prefetcher.close()
    print(prefetcher.describe(), flush=True)
    return 0


def train_rank(rank: RankContext, context: WorkerContext, phase_hook: WorkerHooks, **watchers: Any) -> bool:
    """Trains a rank that is prepared, to the end; False when it has left before or had no place then."""
    control = context.control
    network = SocketNetwork(rank.config, context, rank.device)
    trainer = Trainer(
        rank=rank,
        recovery=RecoveryManager(rank, control.membership, network, host=context.host, publish=control.publish),
        publish=control.publish,
        stop_requested=lambda: control.stop_requested,
        drain_requested=lambda: control.drain_requested,
        on_phase=phase_hook.begin,
        **watchers,
    )
    is_here = trainer.run()
    if is_here:
        close_generation(rank)
    return is_here


def build_saver(rank: RankContext, text: dict[str, Any], files: Mapping[str, bytes]) -> CheckpointSaver:
    settings = rank.config.checkpoint
    if not (settings.save_at_end or save_intervals(settings)):
        return NoSaver()
    return AsyncSaver(rank, CheckpointDirectory(Path(str(settings.directory))), text, files)


class WorkerHooks:
    """Watches one rank at work: signs of life with every instruction, the faults that it shall have, traces."""

    def __init__(self, config: Config, context: WorkerContext, trace: NoTrace | None = None, *, attempt: int = 0):
        size, last_step = context.world_size, num_steps(config)
        faults = plan_faults(config.elastic, world_size=size, num_steps=last_step, attempt=attempt)
        self._injector = FaultInjector(faults, context.rank, self._fail)
        self.corrupt_weight: Callable[[str], None] = lambda kind: None
        """Changes a weight, for faults of kind flip and nan."""
        self._heartbeat = context.heartbeat
        self._worker_status = context.worker_status
        self._trace = trace or NoTrace()
        self._num_steps = 0

    def on_instruction(self, instruction: Instruction) -> None:
        self._heartbeat.tick()
        self._worker_status.enter(instruction)
        self._injector.enter_instruction(instruction.op.value)

    def enter_phase(self, phase: str) -> None:
        self._heartbeat.tick()
        self._worker_status.enter(phase)
        self._injector(phase)

    def _fail(self, kind: str) -> None:
        if kind in ("flip", "nan"):
            self.corrupt_weight(kind)
        else:
            inject_fault(kind)

    def begin(self, phase: Phase, step: int) -> None:
        """Evaluation counts few instructions. The first steps are slow in ways that tell nothing: memory is touched for
        the first time, kernels are made."""
        self._worker_status.begin(phase.value, step)
        if phase is Phase.STEP:
            self._heartbeat.mode = Mode.SUSPENDED  # a profiler that starts or writes holds Python's lock
            self._trace.begin_step(step)
        self._num_steps += phase is Phase.STEP
        is_usual = phase is Phase.STEP and self._num_steps > WARMUP_STEPS
        self._heartbeat.step = step
        self._heartbeat.mode = Mode.RUNNING if is_usual else Mode.SUSPENDED
        self._injector.begin_step(step)


def corrupt_weight(rank: RankContext, kind: str) -> None:
    """An injected fault of this process' memory, once all weights are there: the lowest bit of the first one (flip), or
    all of its bits (nan)."""
    rank.optimizer.finish_gather()
    weights = rank.optimizer.buckets[-1].weights
    if kind == "nan":
        weights[0] = float("nan")
    else:
        weights[:1].view(torch.uint8)[0] ^= 1
    print(f"injected fault: {kind} of a weight of {rank.optimizer.buckets[-1].plan.param_slots[0].name}", flush=True)


def inject_fault(kind: str) -> None:
    """An injected fault of this process."""
    print(f"injected fault: {kind} at {time.monotonic():.6f}", flush=True)
    number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}[kind]
    os.kill(os.getpid(), number)


def choose_num_threads(config: Config, local_world_size: int) -> int:
    """CPU threads of this rank; with exact sums not a matter of the layout, since some kernels add by threads."""
    if config.run.threads_per_rank is not None:
        return config.run.threads_per_rank
    return 1 if config.precision.sums == "exact" else max(1, (os.cpu_count() or 1) // local_world_size)


def choose_device(config: Config, local_rank: int, local_world_size: int) -> torch.device:
    """The device that `run.device` means on this machine; ConfigError when it is not there."""
    wanted, num_devices = config.run.device, torch.cuda.device_count()
    if wanted == "cpu" or (wanted == "auto" and num_devices < local_world_size):
        return torch.device("cpu")
    if wanted == "cuda_shared" and num_devices > 0:
        return torch.device("cuda", local_rank % num_devices)
    if local_rank >= num_devices:
        rule = f"local rank {local_rank} has no device: {num_devices} found"
        fix = "Start fewer workers on this host, or set run.device to cpu."
        raise ConfigError([Problem(field="run.device", value=wanted, rule=rule, fix=fix)])
    return torch.device("cuda", local_rank)


def init_device(device: torch.device) -> None:
    """Makes it this process' own, before anything is put on it. What is compiled for it is so in this process: helpers
    would outlive a worker that is killed."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if device.type == "cuda":
        for name, value in NCCL_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        torch.cuda.set_device(device)


class SocketNetwork(Network):
    """Groups that meet through the control channel's store, by NCCL or gloo as the ranks have a GPU each or not, and
    sockets between pairs of ranks."""

    def __init__(self, config: Config, context: WorkerContext, device: torch.device | str = "cpu"):
        self._config = config
        self._context = context
        self._device = torch.device(device)
        self._listener: socket.socket | None = None

    def listen(self, generation: int) -> Address:
        if self._listener is not None:
            self._listener.close()
        self._listener = open_listener(self._context.address)
        host, port = self._listener.getsockname()
        return host, port

    def transports(self, record: GenerationRecord, token: AbortToken) -> Transports:
        assert self._listener is not None, "transports without listen()"
        listener, self._listener = self._listener, None
        links = SocketLinks(
            rank=self._context.rank,
            generation=record.generation,
            listener=listener,
            address_of=lambda rank: record.addresses[rank],
            slots=self._config.parallel.p2p_slots,
            token=token,
            timeout_s=self._config.run.timeout_s,
            pinned=self._device.type == "cuda",
        )

        def make_group(name: str, ranks: tuple[int, ...]) -> Group:
            if len(ranks) == 1:
                return SoloGroup(name=name, rank=self._context.rank)
            settings: dict[str, Any] = dict(
                name=name,
                rank=ranks.index(self._context.rank),
                ranks=ranks,
                store=ControlStore(self._context.control, token, num_ranks=len(ranks)),
                token=token,
                timeout_s=self._config.run.timeout_s,
            )
            on_host = self._device.type == "cpu" or is_world(name)
            if not on_host and self._config.run.device != "cuda_shared":
                return NcclGroup(**settings, device=self._device)
            group = GlooGroup(**settings, address=self._context.address)
            return group if on_host else StagedGroup(group)

        return Transports(make_group=make_group, links=links, token=token)


def measure_round_trip(rank: RankContext) -> float:
    """Mean seconds of a small all-reduce over all ranks, there and back."""
    number = torch.zeros(1)
    rank.groups.world.all_reduce(number)
    started = time.perf_counter()
    for _ in range(NUM_ROUND_TRIPS):
        rank.groups.world.all_reduce(number)
    return (time.perf_counter() - started) / NUM_ROUND_TRIPS


def describe_total(config: Config) -> dict[str, Any]:
    """How long the run is, and what a step of it has once its warmups are over."""
    batch = plan_batch(config, 0)
    sizes = {"sequence_length": batch.sequence_length, "num_sequences": batch.num_slots}
    return {"num_steps": num_steps(config), **sizes}


def log_generation(
    record: GenerationRecord,
    rank: RankContext,
    corpus: Corpus,
    control: ControlChannel,
    total: dict[str, Any],
    start: StartInstruction,
) -> None:
    """At the start of the run what it is, once; at each further generation a line in this rank's log."""
    if rank.is_leader:  # again in each generation: the coordinator may be a new one
        control.publish({"kind": "total", **total})
    if record.previous is None:
        log_start(rank, corpus, control, is_restart=start.attempt > 0)
    else:
        print(f"generation {record.generation}: training again at {time.monotonic():.6f}", flush=True)


def log_start(rank: RankContext, corpus: Corpus, control: ControlChannel, *, is_restart: bool) -> None:
    """The leader tells what starts, if that is new; all take part in finding out how much state each rank holds."""
    state = torch.zeros(len(rank.grid.ranks), dtype=torch.float64)
    state[rank.grid.ranks.index(rank.rank)] = rank.optimizer.state_bytes()
    rank.groups.world.all_reduce(state)
    round_trip_s = measure_round_trip(rank)
    peak = find_peak(rank.config, rank.device)
    flops_per_s = rank.groups.world.all_reduce(torch.tensor([peak.flops_per_s], dtype=torch.float64)).item()
    rank.peak = replace(peak, flops_per_s=flops_per_s / len(rank.grid.ranks))
    reset_peak_memory(rank.device)
    if not rank.is_leader:
        return
    held = " ".join(f"{size / 2**20:.1f}" for size in state.tolist())
    lines = [
        f"model: {num_parameters(rank.config.model):,} parameters, {rank.config.precision.policy}",
        describe_start(rank),
        f"optimizer state by rank: {held} MiB",
        f"MFU is of {rank.peak.flops_per_s / 1e9:,.0f} GFLOP/s a rank ({rank.peak.source})",
        f"text: {corpus.num_train_tokens:,} training tokens, unigram entropy {corpus.unigram_entropy:.3f} nats a token",
        *describe_data(rank.config, corpus),
        *describe_warmup(rank.config),
        *(f"warning: {text}" for text in warnings(rank.config)),
    ]
    for line in [] if is_restart else lines:
        control.publish({"kind": "notice", "text": line})
    control.publish({"kind": "round_trip", "seconds": round_trip_s})


def describe_run(rank: RankContext, corpus: Corpus) -> dict[str, Any]:
    """What the summary says beyond the trainer's own figures."""
    config = rank.config
    return {
        "unigram_entropy": corpus.unigram_entropy,
        "world": len(rank.grid.ranks),
        "layout": describe_layout(rank.grid),
        "state_bytes": rank.optimizer.state_bytes(),
        "parameters": num_parameters(config.model),
        "corpus": corpus.fingerprint,
    }
