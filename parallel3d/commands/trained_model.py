"""A trained model for commands that only compute: its weights, its tokenizer, and the ranks that run it.

The weights come from a checkpoint, a run's folder (its newest checkpoint), a Hugging Face folder, or an address of a
remote store. Ranks are threads of this process.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from parallel3d.checkpoint.directory import read_index
from parallel3d.checkpoint.fetch import local_checkpoint
from parallel3d.checkpoint.index import INDEX, Index
from parallel3d.config.derived import family_of
from parallel3d.config.inference import inference_config
from parallel3d.config.load import CACHE_DIRECTORY
from parallel3d.config.schema import Config, ModelConfig
from parallel3d.data.tokenizer import ByteTokenizer, Tokenizer
from parallel3d.data.tokenizer_files import holds_tokenizer, open_tokenizer
from parallel3d.decoding.rank_decoder import DecodingRule, RankDecoder
from parallel3d.decoding.texts import Continuation, Prompt
from parallel3d.errors import CheckpointError, DataError, UserError
from parallel3d.evaluation.rank_scorer import RankScorer
from parallel3d.evaluation.rows import RowScore, ScoredRow, make_batches
from parallel3d.inprocess.loaded_ranks import LoadedRank, run_loaded_ranks
from parallel3d.models.initial_weights import find_checkpoint, open_weights, read_model_config
from parallel3d.models.make import make_stage, shardings_of
from parallel3d.parallel.sharding import UNSHARDED

POLICY_OF = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64", torch.float32: "fp32"}
LONGEST_DEFAULT = 2048
"""The window of models of others that have learned more positions."""
NO_PREFIX: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A folder with weights, and what is known of their training."""

    folder: Path
    model: ModelConfig
    index: Index | None
    """Of our checkpoint; None for weights of others."""

    @property
    def data(self) -> dict[str, Any] | None:
        """The section `data` of the run; None for weights of others."""
        return self.index.facts.config.get("data") if self.index is not None else None

    def prefix_of(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """The tokens in front of every text: weights of others may have learned BOS, ours have learned none."""
        return NO_PREFIX if self.data is not None else tuple(getattr(tokenizer, "prefix_ids", NO_PREFIX))


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def open_trained(source: Path | str) -> TrainedModel:
    """Finds the weights; raises CheckpointError where there are none."""
    path = local_checkpoint(source, CACHE_DIRECTORY)
    folder = find_checkpoint(path) or path
    if not (folder / INDEX).is_file() and not (folder / "config.json").is_file():
        raise CheckpointError(f"{source} is neither a checkpoint, nor a run's folder, nor a Hugging Face folder")
    index = read_index(folder) if (folder / INDEX).is_file() else None
    return TrainedModel(folder=folder, model=read_model_config(folder), index=index)


def find_tokenizer(trained: TrainedModel, given: Path | None) -> Tokenizer:
    """The tokenizer that is given, or the one that lies with the weights."""
    settings = (trained.data or {}).get("tokenizer") or {}
    if given is None and settings.get("kind") == ByteTokenizer.kind:
        return ByteTokenizer()
    if given is None and not holds_tokenizer(trained.folder):
        raise DataError(f"{trained.folder} has no tokenizer: give one with --tokenizer PATH")
    return open_tokenizer(given or trained.folder, eos_id=settings.get("eos_id"))


def compute_config(trained: TrainedModel, options: argparse.Namespace, length: int, *, refusal: str) -> Config:
    """The configuration of ranks for texts of up to `length` tokens, by the options layout, dtype and device.

    Raises UserError with `refusal` if the model has learned fewer positions.
    """
    model = trained.model
    if (most := model.max_position_embeddings) is not None and length > most:
        if family_of(model).positions.are_learned:
            raise UserError(refusal)
        log(f"note: texts of up to {length:,} tokens, and the model was trained on {most:,}")
        model = model.model_copy(update={"max_position_embeddings": length})
    policy = stored_policy(trained) if options.dtype == "auto" else options.dtype
    if policy == "fp16" and options.dtype == "auto" and options.device == "cpu":
        policy = "fp32"
    return inference_config(
        model,
        layout=options.layout,
        policy=policy,
        sequence_length=length,
        seed=trained.index.facts.seed if trained.index is not None else 0,
        num_threads=options.threads,
    )


def default_window(trained: TrainedModel) -> int:
    """The length of training's sequences; of weights of others what their positions allow, up to 2,048 tokens."""
    if trained.data is not None and trained.index is not None:
        return int(trained.index.facts.config["batch"]["sequence_length"])
    return min(trained.model.max_position_embeddings or LONGEST_DEFAULT, LONGEST_DEFAULT)


def stored_policy(trained: TrainedModel) -> str:
    """The policy that computes in the format of the weights."""
    matrices = (sharding for sharding in shardings_of(trained.model) if len(sharding.shape) == 2)
    smallest = min(matrices, key=lambda sharding: sharding.num_elements)
    return POLICY_OF[open_weights(trained.folder)(smallest, tp=UNSHARDED).dtype]


# --- running ----------------------------------------------------------------------------------------------------------


def continue_prompts(
    config: Config,
    trained: TrainedModel,
    prompts: Sequence[Prompt],
    rule: DecodingRule,
    device: torch.device,
    *,
    on_token: Callable[[Continuation], None] | None = None,
) -> list[Continuation]:
    """The texts in the order of the prompts, which the copies of the model share."""

    def body(rank: LoadedRank) -> list[Continuation] | None:
        mine = prompts[rank.coordinates.dp :: rank.num_replicas]
        hear = on_token if on_token is not None and rank.is_first_of_copy else lambda text: None
        texts = RankDecoder(rank.stage, rank.place, rule, on_token=hear).run(mine)
        return texts if rank.is_first_of_copy else None

    found = run_loaded_ranks(config, body, make_stage=make_stage, initial=open_weights(trained.folder), device=device)
    by_copy = [texts for texts in found if texts is not None]
    return [by_copy[number % len(by_copy)][number // len(by_copy)] for number in range(len(prompts))]


def score_rows(
    config: Config,
    trained: TrainedModel,
    rows: Sequence[ScoredRow],
    device: torch.device,
    *,
    batch_size: int,
    document_end: int | None = None,
    on_batch: Callable[[int], None] = lambda num_tokens: None,
) -> list[RowScore]:
    """How well the model predicts the targets of each row, in the order of the rows, whose batches the copies of the
    model share. `document_end`: the token after which attention sees nothing of what is before it; `on_batch` hears how
    many targets each batch has had.
    """
    batches = make_batches(rows, batch_size=batch_size, vocab_size=config.model.vocab_size)

    def body(rank: LoadedRank) -> list[tuple[int, RowScore]]:
        mine = batches[rank.coordinates.dp :: rank.num_replicas]
        reports = rank.place.is_last and rank.coordinates.tp == 0
        scorer = RankScorer(rank.stage, rank.place, document_end=document_end, on_batch=on_batch if reports else None)
        numbers = [number for batch in mine for number in batch]
        scores = scorer.run([[rows[number] for number in batch] for batch in mine])
        return list(zip(numbers, scores, strict=True)) if reports else []

    found = run_loaded_ranks(config, body, make_stage=make_stage, initial=open_weights(trained.folder), device=device)
    by_number = dict(pair for pairs in found for pair in pairs)
    return [by_number[number] for number in range(len(rows))]
