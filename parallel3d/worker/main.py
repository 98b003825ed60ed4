"""The main function of a worker process: opens the data, builds its rank, joins the others, trains."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from inspect import getfile
from pathlib import Path
from typing import Any

import torch

from parallel3d.accelerator import is_accelerator
from parallel3d.checkpoint.directory import CheckpointDirectory
from parallel3d.config.derived import save_intervals
from parallel3d.config.schema import Config
from parallel3d.data.corpus import Corpus
from parallel3d.data.prefetch import Prefetcher
from parallel3d.data.run_data import (
    build_evaluation_lanes,
    build_reader,
    build_reader_processes,
    fingerprint_data,
    open_run_corpus,
)
from parallel3d.debug.trace import NoTrace, make_trace
from parallel3d.elastic.protocol.membership import GenerationRecord
from parallel3d.elastic.protocol.restart_policy import START_KEY, StartInstruction
from parallel3d.elastic.worker.control_channel import ControlChannel
from parallel3d.elastic.worker.memory_holder import memory_held
from parallel3d.elastic.worker.process import WorkerContext
from parallel3d.layers.init import InitMethod, awaited_value
from parallel3d.monitor.run_folder import TRACES
from parallel3d.optim.update_rules import find_rule
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.grid import Grid
from parallel3d.pipeline.schedules import find_schedule
from parallel3d.trainer.build import MakeStage, RunLanes, prepare_rank
from parallel3d.trainer.checkpointing import AsyncSaver, CheckpointSaver, NoSaver
from parallel3d.trainer.context import RankContext
from parallel3d.trainer.generation import close_generation
from parallel3d.trainer.loop import Trainer
from parallel3d.trainer.plans import build_grid
from parallel3d.trainer.recovery import RecoveryManager
from parallel3d.trainer.resume import resume, skip_data_to
from parallel3d.user_code import backward_errors_named, file_of_object, load_object
from parallel3d.worker.admission import admit, describe
from parallel3d.worker.device import (
    are_own_devices,
    choose_device,
    choose_num_threads,
    exchange_device_ids,
    init_device,
)
from parallel3d.worker.fault_injection import corrupt_weight
from parallel3d.worker.gemm_timing import agree_on_gemm
from parallel3d.worker.hooks import WorkerHooks
from parallel3d.worker.join_terms import JOIN_KEY, JoinTerms
from parallel3d.worker.kernel_cache import open_kernel_cache
from parallel3d.worker.network import SocketNetwork
from parallel3d.worker.run_report import RunReport

PACKAGE = Path(__file__).parent.parent
OpenInitialWeights = Callable[[Config], InitMethod | None]
"""Opens the weights that a run starts from; None: random ones."""


def run_worker(
    config: Config, context: WorkerContext, *, make_stage: MakeStage, open_initial_weights: OpenInitialWeights
) -> int:
    """Runs a worker, a spare once it is needed, and once more for another part of the model; returns its exit code.

    `make_stage` builds the rank's layers; `open_initial_weights` opens what `run.initialize_from` names.
    """
    if context.is_spare:
        context = replace(context, is_spare=False, part=context.control.membership.await_part())
        if context.part is None:
            return 0
    with memory_held():
        train_worker(config, context, make_stage=make_stage, open_initial_weights=open_initial_weights)
        while part := context.control.membership.take_move():
            moved = replace(context, part=part)
            train_worker(config, moved, make_stage=make_stage, open_initial_weights=open_initial_weights)
    return 0


def train_worker(
    config: Config, context: WorkerContext, *, make_stage: MakeStage, open_initial_weights: OpenInitialWeights
) -> None:
    """Trains as one rank of the run, starting where the coordinator says."""
    control, token = context.control, context.control.token
    device = set_up_device(config, context)
    grid = build_grid(config)
    start, terms = join_run(context, grid)
    log_notice = partial(publish_notice, control)
    is_leader = context.rank == grid.ranks[0]
    log_notice_once = log_notice if is_leader else lambda text: None
    warn_unused_gpus(config, device, log_notice_once)
    corpus = open_run_corpus(config, token, log_notice)
    prefetcher = build_prefetcher(config, corpus, token, log_notice)
    lanes = RunLanes(train=prefetcher, evaluate=build_evaluation_lanes(config, corpus), eos_id=corpus.train.eos_id)
    hooks = WorkerHooks(config, context, open_trace(config, context.rank, device), attempt=start.attempt)
    rank = prepare_rank(
        config,
        context.rank,
        grid,
        part=context.part,
        make_stage=make_stage,
        lanes=lanes,
        device=device,
        initial=open_initial_weights(config) if start.checkpoint is None else awaited_value,
        hooks=hooks.for_rank(),
        gemm=terms.gemm if terms else agree_on_gemm(config, context, device, start, make_stage, is_leader=is_leader),
    )
    hooks.corrupt_weight = lambda kind: corrupt_weight(rank, kind)
    hooks.coordinates = lambda: str(rank.coordinates)
    data_fingerprint = fingerprint_data(config, corpus)
    identity = describe(config, [PACKAGE, Path(getfile(make_stage)).parent, *user_files(config)], data_fingerprint)
    if terms:
        admit(control, device, identity, terms.identity)
    restore(rank, start, data_fingerprint, log_notice_once)
    report = RunReport(rank, corpus, control.publish, is_restart=start.attempt > 0)
    train_rank(
        rank,
        context,
        hooks,
        saver=build_saver(rank, data_fingerprint, corpus.tokenizer.files if corpus.tokenizer else {}),
        on_generation=partial(begin_generation, rank, context, start.attempt, identity, report),
        data_wait_s=lambda: prefetcher.data_wait_s,
        describe=report.summary,
    )
    hooks.close()
    prefetcher.close()
    print(prefetcher.describe(), flush=True)


def user_files(config: Config) -> list[Path]:
    """The files of the user's own layers, schedules and update rule, which a worker that joins must have alike."""
    found: list[Any] = []
    if config.model.module is not None:
        found.append(load_object(config.model.module, field="model.module"))
    if ":" in config.parallel.schedule:
        found.append(type(find_schedule(config.parallel.schedule)))
    if ":" in config.optimizer.kind:
        found.append(find_rule(config.optimizer.kind))
    if ":" in config.lr_schedule.kind:
        found.append(load_object(config.lr_schedule.kind, field="lr_schedule.kind"))
    return [file_of_object(each) for each in found]


def set_up_device(config: Config, context: WorkerContext) -> torch.device:
    """Chooses and initialises this worker's device and CPU threads, and says where compiled kernels are."""
    print(f"rank {context.rank} is process {os.getpid()} on {context.host}", flush=True)
    has_own_device = are_own_devices(exchange_device_ids(context), context.local_world_size)
    device = choose_device(config, context.local_rank, context.local_world_size, has_own_device=has_own_device)
    kernels = open_kernel_cache(str(config.data.cache_directory))
    kernels.fetch(context.control.token)
    if context.rank == 0:
        kernels.keep_later()
    init_device(device, deterministic=config.run.deterministic, kernels=kernels.folder)
    print(f"computing on {device}; GPUs found: {torch.cuda.device_count()}", flush=True)
    torch.set_num_threads(choose_num_threads(config, context.local_world_size))
    torch.set_flush_denormal(True)
    return device


def join_run(context: WorkerContext, grid: Grid) -> tuple[StartInstruction, JoinTerms | None]:
    """Introduces this worker to the coordinator and waits for its start instruction; a worker that joins later gets it
    from the leader, with all else that it must know."""
    control = context.control
    if context.part is None:
        control.publish({"kind": "hello", "coordinates": str(grid.coordinates(context.rank))})
        return StartInstruction.from_json(json.loads(control.get(START_KEY, control.token))), None
    terms = JoinTerms.decode(control.get(JOIN_KEY, control.token))
    torch.set_num_threads(terms.num_threads)
    return terms.start, terms


def begin_generation(
    rank: RankContext,
    context: WorkerContext,
    attempt: int,
    identity: dict[str, str],
    report: RunReport,
    record: GenerationRecord,
) -> None:
    """Reports a new generation, and puts what joiners must know into the store: its coordinator may be a new one."""
    if rank.is_leader:
        terms = JoinTerms(attempt=attempt, gemm=rank.gemm, num_threads=torch.get_num_threads(), identity=identity)
        context.control.set(JOIN_KEY, terms.encode())
    report.on_generation(record)


def publish_notice(control: ControlChannel, text: str) -> None:
    control.publish({"kind": "notice", "text": text})


def warn_unused_gpus(config: Config, device: torch.device, log_notice: Callable[[str], None]) -> None:
    """Reports that workers use the CPU although the host has GPUs."""
    if config.run.device == "auto" and not is_accelerator(device) and torch.cuda.device_count():
        log_notice("warning: run.device auto uses the CPU: there are fewer GPUs here than workers")


def open_trace(config: Config, rank: int, device: torch.device) -> NoTrace:
    """The trace that `debug.profile` asks for, in the run's folder."""
    directory = Path(str(config.run.directory)) / TRACES
    return make_trace(config.debug.profile, rank=rank, directory=directory, device=device)


def build_prefetcher(
    config: Config, corpus: Corpus, token: AbortToken, log_notice: Callable[[str], None]
) -> Prefetcher:
    """Starts reading the training lanes ahead, in processes of their own if so configured."""
    processes = build_reader_processes(config, corpus, token, log_notice)
    return Prefetcher(build_reader(config, corpus), config.data.prefetch, token, processes)


def restore(
    rank: RankContext,
    start: StartInstruction,
    data_fingerprint: dict[str, Any],
    log_notice: Callable[[str], None],
) -> None:
    """Loads the checkpoint and the data position that the start instruction names, if any."""
    if start.checkpoint is not None:
        for line in resume(rank, Path(start.checkpoint), data_fingerprint):
            log_notice(line)
    if start.data is not None:
        rank.state = skip_data_to(rank.state, start.data)


def train_rank(rank: RankContext, context: WorkerContext, hooks: WorkerHooks, **callbacks: Any) -> bool:
    """Trains a prepared rank to the end; returns False if it left before, or was a spare then."""
    control = context.control
    network = SocketNetwork(rank.config, context, rank.device)
    trainer = Trainer(
        rank=rank,
        recovery=RecoveryManager(rank, control.membership, network, host=context.host, publish=control.publish),
        publish=control.publish,
        stop_requested=lambda: control.stop_requested,
        drain_requested=lambda: control.drain_requested,
        change_requested=lambda: control.membership.change_requested,
        on_phase=hooks.begin,
        **callbacks,
    )
    hooks.enter_phase("build")
    control.membership.announce_ready()
    module = rank.config.model.module
    with nullcontext() if module is None else backward_errors_named(f"model.module {module}"):
        is_here = trainer.run()
    if is_here:
        close_generation(rank)
    return is_here


def build_saver(
    rank: RankContext, data_fingerprint: dict[str, Any], tokenizer_files: Mapping[str, bytes]
) -> CheckpointSaver:
    settings = rank.config.checkpoint
    if not (settings.save_at_end or save_intervals(settings)):
        return NoSaver()
    return AsyncSaver(rank, CheckpointDirectory(Path(str(settings.directory))), data_fingerprint, tokenizer_files)
