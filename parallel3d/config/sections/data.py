"""Which text a run reads, and how: sources, blends of several, slices of a file of tokens, tokenizers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from parallel3d.config.sections.base import Fraction, Section


class BlendStageConfig(Section):
    """Weights from one token of the run on."""

    from_token: NonNegativeInt = 0
    """Tokens that the run has read before; 0 for the first stage, growing from one to the next."""
    weights: dict[str, NonNegativeFloat]
    """Share of the tokens by source. They sum to 1; a source that is left out has none."""


class BlendConfig(Section):
    """Several sources, of which each has a share of the tokens: {"sources": {"web": ["web/*.jsonl"], "code": ["src"]},
    "stages": [{"weights": {"web": 0.7, "code": 0.3}}]}. Each sequence is of one source."""

    sources: dict[str, list[str]] = {}
    """Files, folders or globs of each source, by a name of your own. Each needs batch.global_batch_size documents."""
    stages: list[BlendStageConfig] = []
    """Weights, and the tokens at which they change: one stage at least. A source that weighs more than it is long is
    read again, in another order, while others are still at their first pass."""
    renormalise: bool = False
    """Divide the weights of a stage by their sum, whatever it is."""


class SliceConfig(Section):
    """A part of one file of tokens, read from its start to its end in whole global batches, in the file's order."""

    start_token: NonNegativeInt = 0
    """First token. To go on where another run has ended, give the token that it has named at its start."""
    min_tokens: Annotated[int, Field(ge=-1)] = -1
    """Tokens to read, rounded up to whole global batches. -1: as many global batches as fit."""


class TokenizerConfig(Section):
    """How text becomes tokens."""

    kind: Literal["sentencepiece", "bytes"] = "sentencepiece"
    """sentencepiece: byte-pair encoding; bytes: the 256 bytes of UTF-8 and EOS, which want model.vocab_size 257."""
    vocab_size: PositiveInt | None = None
    """Pieces of a tokenizer that is trained on the corpus; at most model.vocab_size. Null: model.vocab_size."""
    path: str | None = None
    """A trained SentencePiece model file. Null: train one on the corpus, and keep it in data.cache_directory."""
    eos_id: NonNegativeInt | None = None
    """The id that ends documents in files of tokens which do not say it themselves (GPT-2's is 50256)."""


class DataConfig(Section):
    """The text to train on."""

    sources: list[str] = []
    """Files, folders or globs: text (.txt, .jsonl, .arrow, .parquet; other files are read as plain text), or tokens
    (.safetensors, as launch/prepare.py writes). Empty: the built-in corpus, Python's own standard library."""
    blend: BlendConfig | None = None
    """Several sources with weights, in place of `sources`. Null: all text of `sources`, shuffled."""
    slice: SliceConfig | None = None
    """A part of the one file of tokens in `sources`, in the file's order. Null: its documents, shuffled."""
    text_column: str = "text"
    """Name of the text's field in .jsonl files, and of its column in .arrow and .parquet files."""
    validation_fraction: Fraction = 0.01
    """Share of the documents that is kept for evaluation; of tokens without effect where there is a
    validation.safetensors."""
    document_chars: NonNegativeInt | None = None
    """Plain text longer than this many characters is cut at line ends into documents. 0: never, a file is a document
    and has to fit into memory. Null: chosen by the corpus' size and the number of lanes (batch.global_batch_size)."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """How text becomes tokens."""
    document_mask: bool = False
    """Attention does not cross the end of a document (EOS) in a packed sequence: each document is trained on as if it
    were a sequence of its own. Also in evaluations."""
    cache_directory: str | None = None
    """Folder for tokenizers and indexes that are made once. Null: ~/.cache/parallel3d."""
    prefetch: PositiveInt = 2
    """Steps whose batches are made ahead."""
    num_processes: NonNegativeInt = 0
    """Processes that tokenise ahead, for each rank that reads text. 0: a thread of the rank, which is best unless the
    tokenizer is slow."""
