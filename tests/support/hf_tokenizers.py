"""Tokenizers of Hugging Face, trained here on a few lines, in folders as transformers saves them."""

import json

SAMPLE = ["def f(x):\n    return x + 1\n\n\nclass A:\n\tpass  # 2026\n", "the cat's mat; Größe, 漢字 😀\n"] * 9
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write_folder(folder, *, kind="gpt2", settings=None, **others):
    """A folder as transformers saves it, with a tokenizer that is trained here; `others` are its further files."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE(ignore_merges=kind == "llama3"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind == "llama3":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(LLAMA3_WORDS), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(SAMPLE, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"] if kind == "llama3" else ["<|endoftext|>"]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.add_tokens(["<tool>"])
    if kind == "llama3":
        begin = (special[0], tokenizer.token_to_id(special[0]))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{special[0]} $A", pair=f"{special[0]} $A {special[0]} $B", special_tokens=[begin]
        )
        tokenizer.enable_truncation(7)
    if kind == "vocab and merges":
        tokenizer.model.save(str(folder))
        vocab = json.loads((folder / "vocab.json").read_text())
        (folder / "vocab.json").write_text(json.dumps(vocab | {"<|endoftext|>": len(vocab)}))
        others["special_tokens_map"] = {"eos_token": "<|endoftext|>"}
        settings = {"tokenizer_class": "GPT2Tokenizer", **(settings or {})}
    else:
        tokenizer.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": special[-1], **(settings or {})}
    for name, content in {"tokenizer_config": settings, **others}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder
