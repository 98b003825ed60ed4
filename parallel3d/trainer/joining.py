"""How a rank that joins a run gets its train state: one of those that have trained sends it over the links.

The rest it gets as every rank does after a loss: its ranges of optimizer state by the reshard, its weights by the
gather.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict
from functools import partial

import numpy as np
import torch

from parallel3d.elastic.protocol.membership import GenerationRecord
from parallel3d.monitor.flops import Peak
from parallel3d.optim.bucket import Bucket
from parallel3d.parallel.p2p_messages import Header, Kind, Links
from parallel3d.trainer.context import RankContext
from parallel3d.trainer.resume import state_from_json, whole_state_to_json
from parallel3d.trainer.seen_steps import SeenSteps

_WORD_BYTES = 8


def share_train_state(rank: RankContext, record: GenerationRecord, links: Links) -> None:
    """Sends the train state to the joiners of `record`, or receives it. Does nothing on all other ranks.

    Raises GenerationEnded if a worker is lost before.
    """
    header = partial(Header, generation=record.generation, iteration=0, kind=Kind.TRAIN_STATE, dtype=torch.int64)
    if record.joiners and rank.rank == record.state_source:
        words = encode_train_state(rank)
        for joiner in record.joiners:
            links.send(joiner, header(micro_batch=0, shape=(1,)), torch.tensor([len(words)]), bounded=False)
            links.send(joiner, header(micro_batch=1, shape=(len(words),)), words, bounded=False)
    if rank.rank in record.joiners:
        source = record.state_source
        num_words = int(links.receive(source, header(micro_batch=0, shape=(1,))).item())
        load_train_state(rank, links.receive(source, header(micro_batch=1, shape=(num_words,))))


def encode_train_state(rank: RankContext) -> torch.Tensor:
    """Returns the train state as compressed JSON, padded to whole words (num_words,)."""
    data = {
        "state": whole_state_to_json(rank.state),
        "resumed_from": rank.resumed_from,
        "history": rank.history.to_json(),
        "peak": rank.peak and asdict(rank.peak),
    }
    text = zlib.compress(json.dumps(data).encode(), level=1)  # all wait: 2 ms for 10,000 losses, 16 at the default
    return torch.from_numpy(np.frombuffer(text + bytes(-len(text) % _WORD_BYTES), dtype=np.int64).copy())


def load_train_state(rank: RankContext, words: torch.Tensor) -> None:
    """Gives `rank` the train state; its weights and its ranges of optimizer state are out of date until they come."""
    data = json.loads(zlib.decompressobj().decompress(words.numpy().tobytes()))
    rank.state = state_from_json(data["state"], rank.state)
    rank.resumed_from, rank.history = data["resumed_from"], SeenSteps.from_json(data["history"])
    rank.peak = data["peak"] and Peak(**data["peak"])
    rank.optimizer.start_from(rank.state.iteration, Bucket.initial_shard)
