"""A model's parameters by layer, so that those of any stage can be put together. Pure.

The shardings are those of the model's own modules (`models.make.shardings_of`), which a command passes in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from parallel3d.costs.state_bytes import StateBytes
from parallel3d.parallel.sharding import ParamSharding

_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True, eq=False)
class LayeredParameters:
    """Parameters in forward order: those before the layers, of each layer, and after them."""

    before: tuple[ParamSharding, ...]
    layers: tuple[tuple[ParamSharding, ...], ...]
    after: tuple[ParamSharding, ...]
    _counted: dict[Hashable, StateBytes] = field(default_factory=dict)

    @staticmethod
    def of(shardings: Sequence[ParamSharding], num_layers: int) -> LayeredParameters:
        """Divides the parameters of a whole model, of which a tied one comes once. Its last stage has it again."""
        before: list[ParamSharding] = []
        layers: list[list[ParamSharding]] = [[] for _ in range(num_layers)]
        after: list[ParamSharding] = []
        for each in shardings:
            if found := _LAYER.match(each.name):
                layers[int(found[1])].append(each)
            else:
                (after if any(layers) else before).append(each)
        after += [each for each in before if each.tied]
        return LayeredParameters(tuple(before), tuple(map(tuple, layers)), tuple(after))

    def of_stage(self, chunks: Sequence[range]) -> tuple[ParamSharding, ...]:
        """The parameters of a stage with these chunks of layers, one of several chunks once."""
        found: dict[str, ParamSharding] = {}
        for chunk in chunks:
            parts = [self.before] if chunk.start == 0 else []
            parts += [self.layers[index] for index in chunk]
            parts += [self.after] if chunk.stop == len(self.layers) else []
            found |= {each.name: each for part in parts for each in part}
        return tuple(found.values())

    @cached_property
    def has_equal_layers(self) -> bool:
        """Whether all layers have the same parameters, but for their names."""
        shapes = [[(each.shape, each.dim, each.is_norm_or_bias) for each in layer] for layer in self.layers]
        return all(each == shapes[0] for each in shapes)

    def remember(self, chunks: Sequence[range], key: Hashable, count: Callable[[], StateBytes]) -> StateBytes:
        """The result of `count` for a stage with these chunks: stages with as many layers, all equal, share it."""
        ends = any(chunk.start == 0 for chunk in chunks), any(chunk.stop == len(self.layers) for chunk in chunks)
        layers: Hashable = sum(map(len, chunks)) if self.has_equal_layers else tuple(chunks)
        if (layers, ends, key) not in self._counted:
            self._counted[layers, ends, key] = count()
        return self._counted[layers, ends, key]
