"""How the learning rate decays: a function of the decay's progress, from 0 to 1, that returns a share, from 1 to 0.

Ours; those of installed packages, as entry points of the group parallel3d.lr_schedules; and the user's own as
"package:function".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache

from parallel3d.errors import ConfigError, Problem, UserCodeError
from parallel3d.user_code import FIX, errors_named, explain, file_of_object, installed_by_name, load_object

DecayShape = Callable[[float], float]

FIELD = "lr_schedule.kind"
OUR_SHAPES: Mapping[str, DecayShape] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "1-sqrt": lambda progress: 1.0 - math.sqrt(progress),
}
INSTALLED_SHAPES: Mapping[str, DecayShape] = {
    name: found for name, found in installed_by_name("parallel3d.lr_schedules") if name not in OUR_SHAPES
}
SHAPE_NAMES = (*OUR_SHAPES, *INSTALLED_SHAPES)
TRIED = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Progress at which a function of the user's is tried before the run starts."""


def find_shape(kind: str) -> DecayShape:
    """The shape of one of SHAPE_NAMES, or the user's that is called "package:function"; raises ConfigError."""
    return OUR_SHAPES[kind] if kind in OUR_SHAPES else _load_shape(kind)


@cache
def _load_shape(kind: str) -> DecayShape:
    found = INSTALLED_SHAPES[kind] if kind in INSTALLED_SHAPES else load_object(kind, field=FIELD)

    def shape(progress: float) -> float:
        with errors_named(f"{FIELD} {kind}"):
            share = float(found(progress))
        if not 0.0 <= share <= 1.0:
            raise UserCodeError(f"{FIELD} {kind}: {share:g} at progress {progress:g} is not a share from 0 to 1")
        return share

    try:
        file_of_object(found)  # a worker that joins must have it alike
        for progress in TRIED:
            shape(progress)
    except Exception as error:  # whatever the user's function raises
        rule = str(error) if isinstance(error, UserCodeError) else explain(error, found)
        rule = rule.removeprefix(f"{FIELD} {kind}: ")
        raise ConfigError([Problem(field=FIELD, value=kind, rule=rule, fix=FIX)]) from error
    return shape
