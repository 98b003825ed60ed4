"""A worker's reports on the run: its description at the start, its generations, its summary."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from parallel3d.config.derived import num_parameters
from parallel3d.config.warmup_builder import describe_warmup, num_steps
from parallel3d.config.warnings import warnings
from parallel3d.data.corpus import Corpus
from parallel3d.data.run_data import describe_data
from parallel3d.elastic.protocol.membership import GenerationRecord
from parallel3d.layers.parameter import parameters_of
from parallel3d.monitor.device_peak import find_peak
from parallel3d.monitor.flops import Peak
from parallel3d.monitor.memory import reset_peak_memory
from parallel3d.trainer.batching import plan_batch
from parallel3d.trainer.context import RankContext
from parallel3d.trainer.reporting import describe_layout, describe_start
from parallel3d.worker.device import describe_device

NUM_ROUND_TRIPS = 20


class RunReport:
    """Reports on the run of one rank through `publish`. The leader speaks for all."""

    def __init__(
        self, rank: RankContext, corpus: Corpus, publish: Callable[[dict[str, Any]], None], *, is_restart: bool
    ):
        self._rank = rank
        self._corpus = corpus
        self._publish = publish
        self._is_restart = is_restart
        batch = plan_batch(rank.config, 0)
        self._total = {
            "num_steps": num_steps(rank.config),
            "sequence_length": batch.sequence_length,
            "num_sequences": batch.num_slots,
        }
        """The run's length, and the shape of a step once its warmups are over."""
        has_own_layers = rank.config.model.module is not None
        self._num_parameters = None if has_own_layers else num_parameters(rank.config.model)
        """None: layers of the user's that were not counted yet."""

    def on_generation(self, record: GenerationRecord) -> None:
        """Describes the run in its first generation; logs each later one to this rank's log."""
        if self._rank.is_leader:  # in each generation: the coordinator may be a new one
            self._publish({"kind": "total", **self._total})
        if record.previous is None:
            self._on_start()
        else:
            print(f"generation {record.generation}: training again at {time.monotonic():.6f}", flush=True)

    def summary(self) -> dict[str, Any]:
        """Returns the summary's fields in addition to the trainer's own."""
        rank = self._rank
        return {
            "unigram_entropy": self._corpus.unigram_entropy,
            "world": len(rank.grid.ranks),
            "layout": describe_layout(rank.grid),
            "state_bytes": rank.optimizer.state_bytes(),
            "parameters": self._num_parameters,
            "corpus": self._corpus.fingerprint,
        }

    def _on_start(self) -> None:
        """Collects measurements of all ranks; the leader publishes them, and describes a new run."""
        rank = self._rank
        state = torch.zeros(len(rank.grid.ranks), dtype=torch.float64)
        state[rank.grid.ranks.index(rank.rank)] = rank.optimizer.state_bytes()
        rank.groups.world.all_reduce(state)
        if rank.config.model.module is not None:
            self._num_parameters = count_parameters(rank)
        round_trip_s = measure_round_trip(rank)
        peak = find_peak(rank.config, rank.device)
        flops_per_s = rank.groups.world.all_reduce(torch.tensor([peak.flops_per_s], dtype=torch.float64)).item()
        rank.peak = peak = replace(peak, flops_per_s=flops_per_s / len(rank.grid.ranks))
        reset_peak_memory(rank.device)
        if rank.is_leader:
            for line in [] if self._is_restart else self._describe_run(state.tolist(), peak):
                self._publish({"kind": "notice", "text": line})
            if facts := describe_device(rank.device):
                self._publish({"kind": "environment", **facts})
            self._publish({"kind": "round_trip", "seconds": round_trip_s})

    def _describe_run(self, state_bytes: list[float], peak: Peak) -> list[str]:
        rank, corpus, config = self._rank, self._corpus, self._rank.config
        state = " ".join(f"{size / 2**20:.1f}" for size in state_bytes)
        return [
            f"model: {self._num_parameters or 0:,} parameters, {config.precision.policy}",
            describe_start(rank),
            f"optimizer state by rank: {state} MiB",
            f"MFU is relative to {peak.flops_per_s / 1e9:,.0f} GFLOP/s per rank ({peak.source})",
            f"data: {corpus.num_train_tokens:,} training tokens, "
            f"unigram entropy {corpus.unigram_entropy:.3f} nats per token",
            *describe_data(config, corpus),
            *describe_warmup(config),
            *(f"warning: {text}" for text in warnings(config)),
        ]


def count_parameters(rank: RankContext) -> int:
    """Returns the parameters of the whole model: each counts on one rank, a tied one on the first stage that has it."""
    at, is_first = rank.coordinates, rank.coordinates.pp == rank.grid.embedding_stages[0]
    own = [p.sharding for p in parameters_of(rank.chunks)] if at.dp == at.tp == 0 else []
    count = sum(sharding.num_elements for sharding in own if is_first or not sharding.tied)
    return int(rank.groups.world.all_reduce(torch.tensor([count], dtype=torch.float64)).item())


def measure_round_trip(rank: RankContext) -> float:
    """Returns the mean seconds of a small all-reduce over all ranks."""
    number = torch.zeros(1)
    rank.groups.world.all_reduce(number)
    started = time.perf_counter()
    for _ in range(NUM_ROUND_TRIPS):
        rank.groups.world.all_reduce(number)
    return (time.perf_counter() - started) / NUM_ROUND_TRIPS
