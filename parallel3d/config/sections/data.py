"""The configuration's section `data`: what text a run reads, and how. Its rules are in data_rules.py."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from parallel3d.config.sections.chat import ChatConfig
from parallel3d.config.sections.section import Fraction, Section


class BlendStageConfig(Section):
    """Weights of the sources from one token of the run on."""

    from_token: NonNegativeInt = 0
    """Tokens that the run has read before this stage; 0 for the first stage, increasing from stage to stage."""
    weights: dict[str, NonNegativeFloat]
    """Share of the tokens by source. They sum to 1; a source without a weight isn't read."""


class BlendConfig(Section):
    """A data mixture, in which each source has a share of the tokens: {"sources": {"web": ["web/*.jsonl"],
    "code": ["src"]}, "stages": [{"weights": {"web": 0.7, "code": 0.3}}]}. Each sequence comes from one source."""

    sources: dict[str, list[str]] = {}
    """Files, folders or globs of each source, by a name of your choice. Each needs batch.global_batch_size
    documents."""
    stages: list[BlendStageConfig] = []
    """Weights, and the tokens at which they change; at least one stage. A source that is shorter than its share is read
    again, in another order, while others are still in their first pass."""
    renormalise: bool = False
    """Divide the weights of a stage by their sum, whatever it is."""


class SliceConfig(Section):
    """A part of one file of tokens, read from start to end in whole global batches, in the file's order."""

    start_token: NonNegativeInt = 0
    """First token. To continue where another run ended, give the token that it printed at its start."""
    min_tokens: Annotated[int, Field(ge=-1)] = -1
    """Tokens to read, rounded up to whole global batches. -1: as many global batches as fit."""


class TokenizerConfig(Section):
    """How text becomes tokens."""

    kind: Literal["sentencepiece", "byte_level_bpe", "bytes"] = "sentencepiece"
    """What is trained without a path: sentencepiece: byte-pair encoding by SentencePiece. byte_level_bpe: as GPT-2 has
    it, by Hugging Face's library. Or bytes, without training: the 256 of UTF-8 and EOS, for model.vocab_size 257."""
    vocab_size: PositiveInt | None = None
    """Pieces of a tokenizer that is trained on the corpus; at most model.vocab_size. Null: model.vocab_size."""
    path: str | None = None
    """A trained tokenizer, whose kind is seen: a Hugging Face folder or its tokenizer.json, or a SentencePiece model
    file; a remote one (s3://, hf://, https://, ...) is copied into data.cache_directory once, all files of a folder.
    Null: train one on the corpus, and keep it there."""
    eos_id: NonNegativeInt | None = None
    """The id that ends documents, for files of tokens that don't record it (GPT-2's is 50256), and for a Hugging Face
    tokenizer whose folder doesn't name it, or names another."""


SOURCE_GROUP = "parallel3d.sources"
"""Entry points of installed packages that give documents."""


class DataConfig(Section):
    """The text to train on."""

    sources: list[str] = []
    """Files, folders or globs of text (.txt, .jsonl, .json, .arrow, .parquet; the first three also as .gz, .bz2, .xz
    and .zst; other files are read as plain text) or of tokens (.safetensors, as launch/prepare.py writes them; .npy;
    .bin of Megatron-LM, nanoGPT and llm.c; .u16, .u32). Remote ones (s3://, gs://, hf://, https://, ... by fsspec) are
    copied into data.cache_directory once; a signature stands in an environment variable of each host, and the address
    ends with its name, ?${NAME}. Or objects of your own that give documents: "package:object",
    "path/to/file.py:object" or the name of an entry point of parallel3d.sources. Empty: the built-in corpus, Python's
    own standard library."""
    blend: BlendConfig | None = None
    """Several sources with weights, instead of `sources`. Null: all text of `sources`, shuffled."""
    slice: SliceConfig | None = None
    """A part of the one file of tokens in `sources`, in the file's order. Null: its documents, shuffled."""
    chat: ChatConfig | None = None
    """Conversations, of whose tokens only replies are targets; if packed, needs document_mask. Null: all text is
    learned."""
    formats: dict[Annotated[str, Field(pattern=r"^\.")], str] = {}
    """Functions of your own that read files, by the end of their names: {".log": "package:function"}, or the name of an
    entry point of parallel3d.formats. A function gets the file's Path, and yields the text of each document; with chat,
    each conversation as a dictionary."""
    text_column: str = "text"
    """Name of the text's field in .jsonl files, and of its column in .arrow and .parquet files."""
    validation_fraction: Fraction = 0.01
    """Share of the documents that is held out for evaluation. No effect on tokens with a validation.safetensors, and on
    saved datasets with a split `validation`."""
    test_fraction: Fraction = 0.0
    """Share of the documents that neither training nor its evaluations read: they are for `parallel3d evaluate RUN
    --slice test`. No effect on tokens with a test.safetensors, and on saved datasets with a split `validation`."""
    document_chars: NonNegativeInt | None = None
    """Plain text longer than this many characters is split into documents at line ends. 0: never; each file is one
    document and must fit into memory. Null: derived from the corpus size and the number of lanes
    (batch.global_batch_size)."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """How text becomes tokens."""
    document_mask: bool = False
    """Attention doesn't cross the end of a document (EOS) in a packed sequence: each document is trained on as if it
    were a sequence of its own. Applies to evaluations too."""
    cache_directory: str | None = None
    """Folder for tokenizers, indexes and compiled kernels, which are made once. Null: ~/.cache/parallel3d. Where it is
    on a network, kernels are compiled into a folder of each host below TMPDIR, which starts with those that the cache
    has and adds what it lacks."""
    prefetch: PositiveInt = 2
    """Steps whose batches are prepared in advance."""
    num_processes: NonNegativeInt = 0
    """Processes that tokenise in advance, for each rank that reads text. 0: a thread of the rank, which is best unless
    the tokenizer is slow."""
