"""State dicts as bytes: plain values as JSON, tensors as they are. Nothing is pickled, so nothing is executed.

Layout: the whole size and that of the JSON, 8 bytes each; the JSON; the bytes of all tensors, one after the other.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parallel3d.errors import UserError

_HEAD_BYTES = 16
_PLAIN = (bool, int, float, str, type(None))


def encode_tree(tree: Any) -> Tensor:
    """Returns a state dict, or a list of them, as one tensor (num_words,) int64. Raises UserError for other objects."""
    tensors: list[Tensor] = []
    text = json.dumps(_strip(tree, tensors, "state")).encode()
    parts = [_as_bytes(tensor) for tensor in tensors]
    size = _HEAD_BYTES + len(text) + sum(map(len, parts))
    head = np.array([size, len(text)], dtype=np.int64).view(np.uint8)
    whole = np.zeros(-(-size // 8) * 8, dtype=np.uint8)
    begin = 0
    for part in (head, np.frombuffer(text, dtype=np.uint8), *parts):
        whole[begin : begin + len(part)] = part
        begin += len(part)
    return torch.from_numpy(whole.view(np.int64))


def decode_tree(words: Tensor) -> Any:
    """Returns what `encode_tree` was given; all tensors are on the CPU."""
    data = words.numpy().view(np.uint8)
    text_size = int(data[8:16].view(np.int64)[0])
    text = data[_HEAD_BYTES : _HEAD_BYTES + text_size].tobytes()
    return _restore(json.loads(text), _Reader(data[_HEAD_BYTES + text_size :]))


class _Reader:
    def __init__(self, data: np.ndarray[Any, np.dtype[np.uint8]]):
        self._data = data
        self._begin = 0

    def next(self, dtype: str, shape: list[int]) -> Tensor:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        end = self._begin + tensor.nbytes
        if tensor.nbytes:
            tensor.view(-1).view(torch.uint8).numpy()[:] = self._data[self._begin : end]
        self._begin = end
        return tensor


def _strip(tree: Any, tensors: list[Tensor], path: str) -> Any:
    """The tree with a description in place of each tensor."""
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return {"tensor": [str(tree.dtype).removeprefix("torch."), list(tree.shape)]}
    if isinstance(tree, dict):
        keys = [_strip(key, tensors, path) for key in tree]
        values = [_strip(value, tensors, f"{path}[{key!r}]") for key, value in tree.items()]
        return {"dict": [list(pair) for pair in zip(keys, values)]}
    if isinstance(tree, list | tuple):
        kind = "list" if isinstance(tree, list) else "tuple"
        return {kind: [_strip(value, tensors, f"{path}[{index}]") for index, value in enumerate(tree)]}
    if isinstance(tree, _PLAIN):
        return tree
    raise UserError(
        f"{path} is {type(tree).__name__}: state dicts may hold tensors, numbers, text, lists, tuples and dicts only"
    )


def _restore(tree: Any, reader: _Reader) -> Any:
    match tree:
        case {"tensor": [dtype, shape]}:
            return reader.next(dtype, shape)
        case {"dict": items}:
            return {_restore(key, reader): _restore(value, reader) for key, value in items}
        case {"list": values}:
            return [_restore(value, reader) for value in values]
        case {"tuple": values}:
            return tuple(_restore(value, reader) for value in values)
    return tree


def _as_bytes(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, dtype=np.uint8)
