"""A folder that transformers has saved, converted to a checkpoint and back: the same bits, for every shape of model."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from parallel3d.commands.convert import main
from parallel3d.models.hf_config import read_hf_config
from tests.support.hf_models import MODELS, their_model

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Returns every tensor of all files of a folder."""
    loaded = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    found = {name: value for file in loaded for name, value in file.items()}
    assert sum(map(len, loaded)) == len(found)
    return found


def assert_same_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """As bytes: 0 and -0 differ, too."""
    assert sorted(ours) == sorted(theirs)
    for name, value in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (value.dtype, value.shape), name
        is_same = torch.equal(ours[name].view(torch.uint8), value.view(torch.uint8))
        assert is_same, name


@pytest.mark.sample(3, rest=12)
@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_what_transformers_has_saved_comes_back_bit_for_bit(tmp_path: Path, name: str, number_format: str) -> None:
    """The tensors under their names, the model in config.json, and what transformers opens then."""
    from transformers import AutoModelForCausalLM  # takes seconds to import

    dtype, saved = FORMATS[number_format], tmp_path / "theirs"
    their_model(name).save_pretrained(tmp_path / "random", max_shard_size="20KB")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "random", dtype=dtype)
    theirs.save_pretrained(saved, max_shard_size="20KB")
    stored = tensors_of(saved)
    assert len(stored) >= 15 and {value.dtype for value in stored.values()} == {dtype}

    assert main(["from-hf", str(saved), str(tmp_path / "ours")]) == 0
    assert main(["to-hf", str(tmp_path / "ours"), str(tmp_path / "back"), "--max-file-gb", "0.00002"]) == 0
    assert_same_bits(tensors_of(tmp_path / "back"), stored)
    assert read_hf_config(tmp_path / "back")[0] == read_hf_config(saved)[0]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert type(again) is type(theirs) and again.dtype == dtype
    assert_same_bits(again.state_dict(), theirs.state_dict())
