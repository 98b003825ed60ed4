"""State dicts travel as bytes: all that torch's optimizers and modules have, and nothing that would be executed."""

from __future__ import annotations

import pytest
import torch

from parallel3d.elastic.drop_in.state_tree import decode_tree, encode_tree
from parallel3d.errors import UserError


def test_an_optimizer_and_a_model_come_back_bit_for_bit() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.8, 0.9))
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    before = [dict(model.state_dict()), optimizer.state_dict()]
    after = decode_tree(encode_tree(before))
    assert repr(before) == repr(after)
    other = torch.optim.AdamW(model.parameters())
    other.load_state_dict(after[1])
    assert other.param_groups[0]["betas"] == (0.8, 0.9)


def test_values_of_all_kinds_come_back() -> None:
    tensors = [torch.tensor([-0.0, float("nan")]), torch.empty(0, 3), torch.tensor(True), torch.ones(3).bfloat16()]
    tree = {1: tensors, "a": (None, 1.5, "text", [{}], -(2**70)), "strided": torch.arange(6).view(2, 3).T}
    after = decode_tree(encode_tree(tree))
    for old, new in zip([*tensors, tree["strided"]], [*after[1], after["strided"]]):
        assert old.dtype == new.dtype and old.shape == new.shape
        assert old.contiguous().view(-1).view(torch.uint8).equal(new.reshape(-1).view(torch.uint8))
    assert after["a"] == tree["a"]


def test_other_objects_are_named() -> None:
    with pytest.raises(UserError, match=r"state\['x'\]\[1\] is object"):
        encode_tree({"x": [1, object()]})
