"""Rules of the section `data`: each mistake has one message, with its field and a fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from parallel3d.config.load import load_config, resolve
from parallel3d.errors import ConfigError
from tests.support.config_files import problems

SOURCES = {"web": ["."], "code": ["."]}
BLEND: dict[str, Any] = {"sources": SOURCES, "stages": [{"weights": {"web": 0.75, "code": 0.25}}]}


def blend(**changes: Any) -> str:
    return f"data.blend={json.dumps(BLEND | changes)}"


def stages(*each: tuple[int, dict[str, float]]) -> list[dict[str, Any]]:
    return [{"from_token": start, "weights": weights} for start, weights in each]


EVEN = {"web": 0.5, "code": 0.5}


@pytest.mark.parametrize(
    ("override", "field", "rule"),
    [
        (blend(stages=stages((0, {"web": 0.5, "code": 0.4}))), "data.blend.stages.0.weights", "their sum is 0.9"),
        (blend(stages=stages((0, EVEN), (9, {"web": 2}))), "data.blend.stages.1.weights", "their sum is 2"),
        (
            blend(stages=stages((0, {"web": 0, "code": 0.0}), (9, EVEN)), renormalise=True),
            "data.blend.stages.0.weights",
            "their sum is 0",
        ),
        (
            blend(stages=stages((0, {"web": 0.5, "coed": 0.5}), (9, EVEN))),
            "data.blend.stages.0.weights",
            "is not a source",
        ),
        (blend(stages=stages((5, EVEN))), "data.blend.stages.0.from_token", "must be 0"),
        (blend(stages=stages((0, EVEN), (9, EVEN), (9, EVEN))), "data.blend.stages.2.from_token", "above 9"),
        (blend(stages=stages((0, {"web": 1}))), "data.blend.sources", "has no weight in any stage"),
        (blend(stages=[]), "data.blend.stages", "must not be empty"),
        (blend(sources={}), "data.blend.sources", "must not be empty"),
        (blend(sources={"web": ["no/such/*.txt"], "code": ["."]}), "data.blend.sources.web.0", "no such file"),
        (blend(sources={"web": [], "code": ["."]}), "data.blend.sources.web", "must name a file"),
        (blend(sources={"web": 5, "code": ["."]}), "data.blend.sources.web", "valid list"),
        (blend(stages=stages((0, {"web": -1, "code": 2}))), "data.blend.stages.0.weights.web", "greater than or equal"),
        (blend(stagse=[]), "data.blend.stagse", "no such field exists"),
        ("data.blend=5", "data.blend", "must be a section"),
        ('data.slice={"min_tokens": -2}', "data.slice.min_tokens", "greater than or equal to -1"),
        ("data.slice={}", "data.slice", "a part of one file"),
        ('data.sources=["https://store/a.txt?X-Amz-Signature=f00"]', "data.sources.0", "must not have a query"),
        ('data.tokenizer.path="https://store/t?sig=f00&download=true"', "data.tokenizer.path", "must not have a query"),
        ('data.sources=["zip://a::https://me:pw@store/a.zip"]', "data.sources.0", "must not have a user"),
        ("data.test_fraction=0.995", "data.test_fraction", "leaves nothing to train on"),
        ("data.test_fraction=10", "data.test_fraction", "less than 1"),
    ],
)
def test_each_mistake_has_one_message(tiny: Path, override: str, field: str, rule: str):
    (problem,) = problems(tiny, override).values()
    assert problem.field == field and rule in problem.rule, problem
    assert problem.fix


@pytest.mark.parametrize("source", ["https://hub/a.txt?download=true", "https://hub/a.txt?${NAME}", "s3://a/b?/*.txt"])
def test_a_query_that_is_no_secret_is_allowed(tiny: Path, source: str):
    load_config(tiny, [f'data.sources=["{source}"]', f'data.tokenizer.path="{source}"'])


@pytest.mark.parametrize(
    "overrides",
    [
        ['data.sources=["https://me:SECRET@store/a.txt?sig=SECRET"]', blend()],
        ["data.sources=https://store/a.txt?sig=SECRET"],
        ['data.blend={"sources": {"web": ["https://store/a.txt?sig=SECRET"]}, "stages": []}'],
        ['data.tokenizer={"pth": "zip://a::https://me:SECRET@store/a?sig=SECRET"}'],
    ],
)
def test_no_message_has_what_is_secret(tiny: Path, overrides: list[str]):
    with pytest.raises(ConfigError) as caught:
        load_config(tiny, overrides)
    assert "SECRET" not in str(caught.value) and "://" in str(caught.value)


def test_a_sum_that_is_not_one_says_what_else_there_is(tiny: Path):
    (problem,) = problems(tiny, blend(stages=stages((0, {"web": 90, "code": 59})))).values()
    assert "their sum is 149" in problem.rule and "data.blend.renormalise" in problem.fix
    config = load_config(tiny, [blend(stages=stages((0, {"web": 90, "code": 59})), renormalise=True)])
    assert config.data.blend is not None and config.data.blend.stages[0].weights == {"web": 90, "code": 59}


def test_a_blend_names_all_sources_itself(tiny: Path):
    assert set(problems(tiny, blend(), 'data.sources=["."]')) == {"data.sources"}
    assert set(problems(tiny, blend(), "data.slice={}")) == {"data.slice"}


def test_a_slice_of_nothing(tiny: Path):
    assert set(problems(tiny, 'data.slice={"min_tokens": 0}', 'data.sources=["."]')) == {"data.slice.min_tokens"}


def test_a_slice_holds_nothing_out_for_a_test(tiny: Path):
    found = problems(tiny, "data.slice={}", 'data.sources=["."]', "data.test_fraction=0.1")
    assert set(found) == {"data.test_fraction"} and "can't be combined with data.slice" in str(found)


def test_a_slice_has_no_smaller_batches(tiny: Path):
    grows = 'warmup.batch_size={"start": 4, "duration": 5}'
    (problem,) = problems(tiny, "data.slice={}", 'data.sources=["."]', grows).values()
    assert problem.field == "data.slice" and "whole global batches" in problem.rule


def test_homes_are_found_in_blends(tiny: Path):
    config = load_config(tiny, [blend(sources={"web": ["~"], "code": ["."]})])
    resolved = resolve(config, config_path=tiny)
    assert resolved.data.blend is not None and resolved.data.blend.sources["web"] == [str(Path.home())]
