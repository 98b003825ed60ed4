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

from launch.initial import open_initial
from models.make import make_stage
from parallel3d.checkpoint.catalogue import Catalogue
from parallel3d.comm.abort import AbortToken
from parallel3d.comm.gloo import GlooGroup
from parallel3d.comm.group import Group, SoloGroup
from parallel3d.comm.nccl import NCCL_ENVIRONMENT, NcclGroup
from parallel3d.comm.sockets import SocketLinks, open_listener
from parallel3d.comm.staging import StagedGroup
from parallel3d.config.derived import num_parameters, save_intervals, warnings
from parallel3d.config.paces import describe_warmup, num_steps
from parallel3d.config.schema import Config
from parallel3d.data.corpus import Corpus
from parallel3d.data.prefetch import Prefetcher
from parallel3d.debug.trace import NoTrace, make_trace
from parallel3d.elastic.control import Control
from parallel3d.elastic.faults import FaultInjector, plan_faults
from parallel3d.elastic.membership import Address, EpochRecord
from parallel3d.elastic.pulse import Mode
from parallel3d.elastic.restart import START_KEY, StartOrder
from parallel3d.elastic.spawn import WorkerContext
from parallel3d.elastic.store import ControlStore
from parallel3d.errors import ConfigError, Problem
from parallel3d.monitor.device_peak import find_peak
from parallel3d.monitor.memory import forget_peak
from parallel3d.monitor.run_folder import TRACES
from parallel3d.pipeline.instructions import Instruction
from parallel3d.topology.groups import is_world
from parallel3d.trainer.build import RankRuntime, Transports, build_grid, plan_batch, prepare_rank
from parallel3d.trainer.loop import Phase, Trainer, describe_layout, describe_start
from parallel3d.trainer.recover import Member, Network
from parallel3d.trainer.resume import read_on_from, resume
from parallel3d.trainer.saving import AsyncSaving, NoSaving, Saving
from parallel3d.trainer.text import (
    build_reader,
    describe_reading,
    evaluation_lanes,
    identify,
    make_helpers,
    open_text,
)

WARMUP_STEPS = 2
NUM_ROUND_TRIPS = 20


def run_worker(config: Config, context: WorkerContext) -> int:
    """Trains as one rank of the run, from where the coordinator says; returns its exit code."""
    control, token = context.control, context.control.token
    print(f"rank {context.rank} is process {os.getpid()} on {context.host}", flush=True)
    device = choose_device(config, context.local_rank, context.local_world_size)
    take_device(device)
    print(f"computing on {device}; GPUs found: {torch.cuda.device_count()}", flush=True)
    torch.set_num_threads(choose_num_threads(config, context.local_world_size))
    torch.set_flush_denormal(True)
    grid = build_grid(config)
    control.publish({"kind": "hello", "coordinates": str(grid.coordinates(context.rank))})
    start = StartOrder.from_json(json.loads(control.get(START_KEY, token)))

    def tell(line: str) -> None:
        control.publish({"kind": "notice", "text": line})

    if (
        context.rank == grid.ranks[0]
        and config.run.device == "auto"
        and device.type == "cpu"
        and torch.cuda.device_count()
    ):
        tell("warning: run.device auto takes the CPU: there are fewer GPUs here than workers")
    corpus = open_text(config, token, tell)
    reader = build_reader(config, corpus)
    prefetcher = Prefetcher(reader, config.data.prefetch, token, make_helpers(config, corpus, token, tell))
    directory = Path(str(config.run.directory)) / TRACES
    trace = make_trace(config.debug.profile, rank=context.rank, directory=directory, device=device)
    probe = WorkerProbe(config, context, trace, attempt=start.attempt)
    rank = prepare_rank(
        config,
        context.rank,
        grid,
        make_stage=make_stage,
        train_lanes=prefetcher,
        evaluate_lanes=evaluation_lanes(config, corpus),
        device=device,
        eos_id=corpus.train.eos_id,
        initial=open_initial(config) if start.checkpoint is None else None,
        observe=probe.observe,
        probe=probe.enter_phase,
        label=trace.label,
    )
    probe.harm = lambda kind: harm(rank, kind)
    text, total = identify(config, corpus), describe_whole(config)
    if start.checkpoint is not None:
        for line in resume(rank, Path(start.checkpoint), text):
            if context.rank == grid.ranks[0]:
                tell(line)
    if start.data is not None:
        rank.state = read_on_from(rank.state, start.data)
    train_rank(
        rank,
        context,
        probe,
        saving=make_saving(rank, text, corpus.tokenizer.files if corpus.tokenizer else {}),
        on_epoch=lambda record: tell_epoch(record, rank, corpus, control, total, start),
        data_wait_s=lambda: prefetcher.data_wait_s,
        describe=lambda: describe_run(rank, corpus),
    )
    trace.close()
    prefetcher.close()
    print(prefetcher.describe(), flush=True)
    return 0


def train_rank(rank: RankRuntime, context: WorkerContext, probe: WorkerProbe, **watchers: Any) -> bool:
    """Trains a rank that is prepared, to the end; False when it has left before or had no place then."""
    control = context.control
    network = SocketNetwork(rank.config, context, rank.device)
    trainer = Trainer(
        rank=rank,
        member=Member(rank, control.seat, network, host=context.host, publish=control.publish),
        publish=control.publish,
        stop_requested=lambda: control.stop_requested,
        leave_requested=lambda: control.leave_requested,
        on_phase=probe.begin,
        **watchers,
    )
    is_here = trainer.run()
    if is_here:
        rank.close()
    return is_here


def make_saving(rank: RankRuntime, text: dict[str, Any], files: Mapping[str, bytes]) -> Saving:
    settings = rank.config.checkpoint
    if not (settings.save_at_end or save_intervals(settings)):
        return NoSaving()
    return AsyncSaving(rank, Catalogue(Path(str(settings.directory))), text, files)


class WorkerProbe:
    """Watches one rank at work: signs of life with every instruction, the faults that it shall have, traces."""

    def __init__(self, config: Config, context: WorkerContext, trace: NoTrace | None = None, *, attempt: int = 0):
        size, last_step = context.world_size, num_steps(config)
        faults = plan_faults(config.elastic, world_size=size, num_steps=last_step, attempt=attempt)
        self._injector = FaultInjector(faults, context.rank, self._fail)
        self.harm: Callable[[str], None] = lambda kind: None
        """Changes a weight, for faults of kind flip and nan."""
        self._pulse = context.pulse
        self._whereabouts = context.whereabouts
        self._trace = trace or NoTrace()
        self._num_steps = 0

    def observe(self, instruction: Instruction) -> None:
        self._pulse.tick()
        self._whereabouts.enter(instruction)
        self._injector.enter_instruction(instruction.op.value)

    def enter_phase(self, phase: str) -> None:
        self._pulse.tick()
        self._whereabouts.enter(phase)
        self._injector(phase)

    def _fail(self, kind: str) -> None:
        if kind in ("flip", "nan"):
            self.harm(kind)
        else:
            fail_for_real(kind)

    def begin(self, phase: Phase, step: int) -> None:
        """Evaluation counts few instructions. The first steps are slow in ways that tell nothing: memory is touched for
        the first time, kernels are made."""
        self._whereabouts.begin(phase.value, step)
        if phase is Phase.STEP:
            self._pulse.mode = Mode.SUSPENDED  # a profiler that starts or writes holds Python's lock
            self._trace.begin_step(step)
        self._num_steps += phase is Phase.STEP
        is_usual = phase is Phase.STEP and self._num_steps > WARMUP_STEPS
        self._pulse.step = step
        self._pulse.mode = Mode.RUNNING if is_usual else Mode.SUSPENDED
        self._injector.begin_step(step)


def harm(rank: RankRuntime, kind: str) -> None:
    """An injected fault of this process' memory, once all weights are there: the lowest bit of the first one (flip), or
    all of its bits (nan)."""
    rank.optimizer.finish_gather()
    weights = rank.optimizer.buckets[-1].weights
    if kind == "nan":
        weights[0] = float("nan")
    else:
        weights[:1].view(torch.uint8)[0] ^= 1
    print(f"injected fault: {kind} of a weight of {rank.optimizer.buckets[-1].plan.places[0].name}", flush=True)


def fail_for_real(kind: str) -> None:
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


def take_device(device: torch.device) -> None:
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

    def listen(self, epoch: int) -> Address:
        if self._listener is not None:
            self._listener.close()
        self._listener = open_listener(self._context.address)
        host, port = self._listener.getsockname()
        return host, port

    def transports(self, record: EpochRecord, token: AbortToken) -> Transports:
        assert self._listener is not None, "transports without listen()"
        listener, self._listener = self._listener, None
        links = SocketLinks(
            rank=self._context.rank,
            epoch=record.epoch,
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


def measure_round_trip(rank: RankRuntime) -> float:
    """Mean seconds of a small all-reduce over all ranks, there and back."""
    number = torch.zeros(1)
    rank.groups.world.all_reduce(number)
    started = time.perf_counter()
    for _ in range(NUM_ROUND_TRIPS):
        rank.groups.world.all_reduce(number)
    return (time.perf_counter() - started) / NUM_ROUND_TRIPS


def describe_whole(config: Config) -> dict[str, Any]:
    """How long the run is, and what a step of it has once its warmups are over."""
    batch = plan_batch(config, 0)
    sizes = {"sequence_length": batch.sequence_length, "num_sequences": batch.num_slots}
    return {"num_steps": num_steps(config), **sizes}


def tell_epoch(
    record: EpochRecord,
    rank: RankRuntime,
    corpus: Corpus,
    control: Control,
    total: dict[str, Any],
    start: StartOrder,
) -> None:
    """At the start of the run what it is, once; at each further epoch a line in this rank's log."""
    if rank.is_leader:  # again in each epoch: the coordinator may be a new one
        control.publish({"kind": "total", **total})
    if record.previous is None:
        tell_start(rank, corpus, control, is_restart=start.attempt > 0)
    else:
        print(f"epoch {record.epoch}: training again at {time.monotonic():.6f}", flush=True)


def tell_start(rank: RankRuntime, corpus: Corpus, control: Control, *, is_restart: bool) -> None:
    """The leader tells what starts, if that is new; all take part in finding out how much state each rank holds."""
    state = torch.zeros(len(rank.grid.ranks), dtype=torch.float64)
    state[rank.grid.ranks.index(rank.rank)] = rank.optimizer.state_bytes()
    rank.groups.world.all_reduce(state)
    round_trip_s = measure_round_trip(rank)
    peak = find_peak(rank.config, rank.device)
    flops_per_s = rank.groups.world.all_reduce(torch.tensor([peak.flops_per_s], dtype=torch.float64)).item()
    rank.peak = replace(peak, flops_per_s=flops_per_s / len(rank.grid.ranks))
    forget_peak(rank.device)
    if not rank.is_leader:
        return
    held = " ".join(f"{size / 2**20:.1f}" for size in state.tolist())
    lines = [
        f"model: {num_parameters(rank.config.model):,} parameters, {rank.config.precision.policy}",
        describe_start(rank),
        f"optimizer state by rank: {held} MiB",
        f"MFU is of {rank.peak.flops_per_s / 1e9:,.0f} GFLOP/s a rank ({rank.peak.source})",
        f"text: {corpus.num_train_tokens:,} training tokens, unigram entropy {corpus.unigram_entropy:.3f} nats a token",
        *describe_reading(rank.config, corpus),
        *describe_warmup(rank.config),
        *(f"warning: {text}" for text in warnings(rank.config)),
    ]
    for line in [] if is_restart else lines:
        control.publish({"kind": "notice", "text": line})
    control.publish({"kind": "round_trip", "seconds": round_trip_s})


def describe_run(rank: RankRuntime, corpus: Corpus) -> dict[str, Any]:
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
