"""Rules between fields: each reads what it declares, and is skipped where that is malformed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from parallel3d.config.rule import WORLD_SIZE, Rule, fields_of, nearest_multiples, rule
from parallel3d.config.rules import RULES, SECTIONS, broken_rules
from parallel3d.config.schema import Config
from parallel3d.config.sections import section
from parallel3d.config.sections.section import Section
from parallel3d.errors import Problem
from tests.support.config_files import TINY

NON_DEFAULT: dict[str, Any] = {
    "elastic": {"faults": [{"rank": 0, "step": 1}]},
    "data": {"blend": {"sources": {"a": ["."]}, "stages": [{"weights": {"a": 1.0}}]}, "slice": {}},
    "warmup": {"sequence_length": {"kind": "adaptive"}, "batch_size": {"start": 2, "duration": 9}},
    "debug": {"profile": {"steps": [1, 2]}, "dump_tensors": {"steps": [1]}},
}


def only(section: Section, names: list[str]) -> Section:
    """A copy of the section without its other fields: reading one raises AttributeError."""
    copy = section.model_copy()
    for name in set(type(section).model_fields) - set(names):
        del copy.__dict__[name]
    return copy


@pytest.mark.parametrize("changes", [{}, NON_DEFAULT], ids=["default", "all sections"])
@pytest.mark.parametrize(
    "one", RULES, ids=lambda one: f"{one.check.__module__.rpartition('.')[2]}.{one.check.__name__}"
)
def test_a_rule_reads_only_what_it_declares(one: Rule, changes: dict[str, Any]):
    config = Config.model_validate(TINY | changes)
    values = []
    for read in one.reads:
        value: Any = 1 if read == WORLD_SIZE else config
        if read != WORLD_SIZE:
            for name in read.partition(":")[0].split("."):
                value = getattr(value, name)
        values.append(only(value, read.partition(":")[2].split()) if ":" in read else value)
    assert all(isinstance(problem, Problem) for problem in one.check(*values))


def test_every_declared_field_exists():
    for one in RULES:
        for field in one.fields:
            node: Any = Config.model_validate(TINY)
            for name in field.split("."):
                node = getattr(node, name)


def test_every_section_file_is_collected():
    folder = Path(section.__file__).parent
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "section"}
    assert files == {module.__name__.rpartition(".")[2] for module in SECTIONS}


def test_a_rule_is_skipped_where_a_field_is_malformed():
    config = Config.model_validate(TINY | {"parallel": {"tp_size": 3}})
    found = {problem.field for problem in broken_rules(config, None, set())}
    assert found == {"model.num_attention_heads", "model.intermediate_size"}
    assert not list(broken_rules(config, None, {"parallel.tp_size"}))
    assert not list(broken_rules(config, None, {"parallel"}))
    assert {problem.field for problem in broken_rules(config, None, {"model.intermediate_size"})} == {
        "model.num_attention_heads"
    }


def test_a_section_is_malformed_with_any_of_its_fields():
    @rule("precision.loss_scale")
    def check(scale: object) -> Iterator[Problem]:
        yield Problem(field="a", value=scale, rule="b", fix="c")

    assert check.fields == ("precision.loss_scale",)
    scales = Config.model_validate(TINY | {"precision": {"loss_scale": {"initial": 3.0}}})
    assert list(broken_rules(scales, None, set()))
    assert not list(broken_rules(scales, None, {"precision.loss_scale.growth_factor"}))


def test_declarations():
    assert fields_of("run.seed") == ("run.seed",)
    assert fields_of("run: seed num_steps") == ("run.seed", "run.num_steps")
    assert nearest_multiples(20, 8) == "Use 16 or 24" and nearest_multiples(3, 8) == "Use 8"
