"""What a worker process does: open the text, meet the others, build its rank, train, tell."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from models.llama import make_llama_stage
from parallel3d.comm.abort import AbortToken
from parallel3d.comm.gloo import GlooGroup
from parallel3d.comm.group import Group, SoloGroup
from parallel3d.comm.sockets import Address, SocketLinks, open_listener
from parallel3d.config.derived import num_parameters, warnings
from parallel3d.config.schema import Config
from parallel3d.data.corpus import Corpus, open_corpus
from parallel3d.data.lanes import Lanes
from parallel3d.data.prefetch import Prefetcher
from parallel3d.elastic.control import Control
from parallel3d.elastic.spawn import WorkerContext
from parallel3d.elastic.store import ControlStore
from parallel3d.errors import ConfigError, Problem, ProtocolError
from parallel3d.trainer.build import RankRuntime, Transports, build_grid, build_rank, plan_batch
from parallel3d.trainer.entry import TrainState
from parallel3d.trainer.loop import Trainer, describe_layout, describe_start

EPOCH = 0  # membership epochs begin here
MODELS = {"llama": make_llama_stage}


def run_worker(config: Config, context: WorkerContext) -> int:
    """Trains as one rank of the run; returns its exit code."""
    control, token = context.control, context.control.token
    device = choose_device(config, context.local_rank)
    torch.set_num_threads(config.run.threads_per_rank or max(1, (os.cpu_count() or 1) // context.local_world_size))
    torch.set_flush_denormal(True)
    grid = build_grid(config)
    control.publish({"kind": "hello", "coordinates": str(grid.coordinates(context.rank))})

    corpus = open_text(config, control, token)
    lanes = Lanes(corpus.train, corpus.tokenizer, config.run.seed, plan_batch(config, 0).num_slots)
    prefetcher = Prefetcher(lanes, config.data.prefetch, token)
    transports = meet(config, context, token)
    rank = build_rank(
        config,
        context.rank,
        grid,
        epoch=EPOCH,
        transports=transports,
        make_stage=MODELS[config.model.architecture],
        train_lanes=prefetcher,
        evaluate_lanes=evaluation_lanes(config, corpus),
        device=device,
    )
    check_same_plan(rank)
    tell_start(rank, corpus, control)
    trainer = Trainer(
        rank=rank,
        state=TrainState.start(rank.layout.num_slots),
        publish=control.publish,
        stop_requested=lambda: control.stop_requested,
        data_wait_s=lambda: prefetcher.data_wait_s,
    )
    summary = trainer.run()
    if rank.is_leader:
        control.publish({"kind": "summary", **summary, **describe_run(rank, corpus)})
    prefetcher.close()
    rank.close()
    return 0


def choose_device(config: Config, local_rank: int) -> torch.device:
    """The device that `run.device` means on this machine; ConfigError when it is not there."""
    wants_cuda = config.run.device == "cuda" or (config.run.device == "auto" and torch.cuda.is_available())
    if not wants_cuda:
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        rule = f"local rank {local_rank} has no device: {torch.cuda.device_count()} found"
        fix = "Start fewer workers on this host, or set run.device to cpu."
        raise ConfigError([Problem(field="run.device", value=config.run.device, rule=rule, fix=fix)])
    return torch.device("cuda", local_rank)


def open_text(config: Config, control: Control, token: AbortToken) -> Corpus:
    """The corpus; built by one rank of each host on first use."""
    data = config.data
    assert data.tokenizer.vocab_size is not None and data.cache_directory is not None
    return open_corpus(
        sources=data.sources,
        text_column=data.text_column,
        document_chars=data.document_chars,
        validation_fraction=data.validation_fraction,
        num_lanes=plan_batch(config, 0).num_slots,
        tokenizer_vocab_size=data.tokenizer.vocab_size,
        tokenizer_path=data.tokenizer.path,
        cache_directory=Path(data.cache_directory),
        token=token,
        notice=lambda text: control.publish({"kind": "notice", "text": text}),
    )


def evaluation_lanes(config: Config, corpus: Corpus) -> Lanes | None:
    """As many lanes as the validation text can feed; None when there is none."""
    num_lanes = min(plan_batch(config, 0).num_slots, len(corpus.validation))
    return Lanes(corpus.validation, corpus.tokenizer, config.run.seed, num_lanes) if num_lanes else None


def meet(config: Config, context: WorkerContext, token: AbortToken) -> Transports:
    """Process groups over the control channel's store, and sockets between pipeline stages."""
    control = context.control
    store = ControlStore(control, token)
    listener = open_listener(context.address)
    control.set(f"epoch{EPOCH}/links/{context.rank}", json.dumps(listener.getsockname()).encode())

    def address_of(rank: int) -> Address:
        host, port = json.loads(control.get(f"epoch{EPOCH}/links/{rank}", token))
        return host, port

    def make_group(name: str, ranks: tuple[int, ...]) -> Group:
        if len(ranks) == 1:
            return SoloGroup(name=name, rank=context.rank)
        return GlooGroup(
            name=name,
            rank=ranks.index(context.rank),
            ranks=ranks,
            store=store,
            token=token,
            timeout_s=config.run.timeout_s,
            address=context.address,
        )

    links = SocketLinks(
        rank=context.rank,
        epoch=EPOCH,
        listener=listener,
        address_of=address_of,
        slots=config.parallel.p2p_slots,
        token=token,
        timeout_s=config.run.timeout_s,
    )
    return Transports(make_group=make_group, links=links, token=token)


def check_same_plan(rank: RankRuntime) -> None:
    """All ranks must hold the same instruction lists; ProtocolError otherwise."""
    digest = int(rank.train_plan.digest[:12], 16)  # 48 bits: exact in float64
    ends = rank.groups.world.all_reduce_max(torch.tensor([digest, -digest], dtype=torch.float64))
    if ends[0] != -ends[1]:
        raise ProtocolError("ranks hold different plans: are all of them started with the same configuration?")


def tell_start(rank: RankRuntime, corpus: Corpus, control: Control) -> None:
    """The leader tells what starts; all take part in finding out how much state each rank holds."""
    state = torch.zeros(len(rank.grid.ranks), dtype=torch.float64)
    state[rank.grid.ranks.index(rank.rank)] = rank.optimizer.state_bytes()
    rank.groups.world.all_reduce(state)
    if not rank.is_leader:
        return
    control.publish({"kind": "total", "num_steps": rank.config.run.num_steps})
    held = " ".join(f"{size / 2**20:.1f}" for size in state.tolist())
    lines = [
        f"model: {num_parameters(rank.config.model):,} parameters, {rank.config.precision.policy}",
        describe_start(rank),
        f"optimizer state by rank: {held} MiB",
        f"text: {corpus.num_train_tokens:,} training tokens, unigram entropy {corpus.unigram_entropy:.3f} nats a token",
        *(f"warning: {text}" for text in warnings(rank.config)),
    ]
    for line in lines:
        control.publish({"kind": "notice", "text": line})


def describe_run(rank: RankRuntime, corpus: Corpus) -> dict[str, Any]:
    """What the summary says beyond the trainer's own figures."""
    config = rank.config
    return {
        "unigram_entropy": corpus.unigram_entropy,
        "world": len(rank.grid.ranks),
        "layout": describe_layout(rank.grid),
        "state_bytes": rank.optimizer.state_bytes(),
        "parameters": num_parameters(config.model),
        "planned_bubble": rank.train_plan.bubble,
        "corpus": corpus.fingerprint,
    }
