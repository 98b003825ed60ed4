"""launch/convert.py carries the tokenizer along with the weights, in Hugging Face's form where there is one."""

import io
import json

import sentencepiece
import torch

from parallel3d.checkpoint.index import RunFacts
from parallel3d.checkpoint.tensor_chunks import tensors_of
from parallel3d.checkpoint.weights import write_weights
from parallel3d.data.hf_loader import train_byte_level
from parallel3d.data.tokenizer import train_tokenizer
from parallel3d.data.tokenizer_files import open_tokenizer
from parallel3d.models.make import shardings_of
from tests.support.hf_tokenizers import write_folder
from tests.trainer.test_convert import config_of, convert


def weights_with(folder, files, config=None):
    """A checkpoint of a small model's weights, all zeros, and these files."""
    model = config_of("llama", {}).model.model_copy(update={"vocab_size": 320})
    shapes = {name: shape for sharding in shardings_of(model) for name, shape in tensors_of(sharding).items()}
    facts = RunFacts(state={}, config={"model": model.model_dump(), **(config or {})})
    chunks = (memoryview(bytes(4 * torch.Size(shape).numel())) for shape in shapes.values())
    write_weights(folder, {n: ("F32", s) for n, s in shapes.items()}, chunks, facts=facts, step=1, files=files)
    return folder


def test_the_tokenizer_of_bytes_goes_along(tmp_path, capsys):
    from transformers import AutoTokenizer

    bytes_alone = {"data": {"tokenizer": {"kind": "bytes"}}}
    code, out, err = convert(capsys, "to-hf", weights_with(tmp_path / "a", {}, bytes_alone), tmp_path / "hf")
    assert code == 0 and "note" not in out, err
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer("aß")["input_ids"] == [97, 195, 159] and tokenizer.eos_token_id == 256
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] == 256


def test_a_tokenizer_that_has_no_such_form_goes_along_as_it_is(tmp_path, capsys):
    texts = ["the cat sat on the mat"] * 20
    unigram = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=unigram, vocab_size=20, hard_vocab_limit=False, minloglevel=2
    )
    (tmp_path / "own.model").write_bytes(unigram.getvalue())
    own = train_tokenizer(["a b\n"] * 20, 300)
    source = weights_with(tmp_path / "a", {"tokenizer.model": own})
    code, out, err = convert(capsys, "to-hf", source, tmp_path / "hf", "--tokenizer", tmp_path / "own.model")
    assert code == 0 and "note: tokenizer.json is not written: the tokenizer is not BPE" in out, err
    assert (tmp_path / "hf" / "tokenizer.model").read_bytes() == unigram.getvalue()
    assert not (tmp_path / "hf" / "tokenizer.json").exists()
    assert convert(capsys, "to-hf", source, tmp_path / "hf2")[0] == 0
    assert (tmp_path / "hf2" / "tokenizer.model").read_bytes() == own and (tmp_path / "hf2" / "tokenizer.json").exists()
    (tmp_path / "large.model").write_bytes(train_tokenizer([f"word{n} a{n}b" for n in range(200)], 400))
    code, _, err = convert(capsys, "to-hf", source, tmp_path / "hf3", "--tokenizer", tmp_path / "large.model")
    assert code == 2 and "large.model has 400 pieces, the model a vocabulary of 320" in err


def test_a_tokenizer_of_hugging_face_goes_along_and_transformers_opens_it(tmp_path, capsys):
    from transformers import AutoTokenizer

    folder = write_folder(tmp_path / "t", kind="llama3", generation_config={"eos_token_id": [3, 4], "top_k": 7})
    ours = open_tokenizer(folder)
    code, out, err = convert(capsys, "to-hf", weights_with(tmp_path / "a", ours.files), tmp_path / "hf")
    assert code == 0 and "note" not in out, err
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (folder / name).read_bytes()
    theirs, text = AutoTokenizer.from_pretrained(tmp_path / "hf"), "the cat's Größe 漢字 😀<tool>\n\n"
    assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text).tolist()
    assert theirs.eos_token_id == ours.eos_id
    generation = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    assert generation == {"eos_token_id": ours.eos_id, "top_k": 7}
    source = weights_with(tmp_path / "b", {"tokenizer.model": train_tokenizer(["a b\n"] * 20, 300)})
    assert convert(capsys, "to-hf", source, tmp_path / "hf2", "--tokenizer", folder)[0] == 0
    assert (tmp_path / "hf2" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert not (tmp_path / "hf2" / "tokenizer.model").exists()


def test_a_tokenizer_that_was_trained_here_opens_in_transformers(tmp_path, capsys):
    from transformers import AutoTokenizer

    ours = train_byte_level(["the cat sat on the mat, größer 漢字\n"] * 20, 300)
    code, _, err = convert(capsys, "to-hf", weights_with(tmp_path / "a", ours.files), tmp_path / "hf")
    assert code == 0, err
    theirs, text = AutoTokenizer.from_pretrained(tmp_path / "hf"), "the 漢字 größ, 😀\n  x"
    assert theirs(text)["input_ids"] == ours.encode(text).tolist() and theirs.decode(theirs(text)["input_ids"]) == text
    assert theirs.eos_token_id == ours.eos_id == 0
