"""Gates on what a step asks of a GPU, counted on meta tensors with the Triton forms of the kernels.

Counts are exact; speeds are predictions of a model (rehearsal/roofline.py) for an H200. A gate that is not reached yet
is a strict xfail that says the figure; its limit stays.
"""

from functools import cache

import pytest

from benchmarks.device.workloads import load_workload
from benchmarks.device_plan import settings_of
from parallel3d.models.make import make_stage
from parallel3d.rehearsal.config_estimate import estimate_on
from parallel3d.rehearsal.device_rows import find_rows
from parallel3d.rehearsal.meta_rank import LayeredRehearsal

[H200] = find_rows("H200", None)


@cache
def rehearsed(name):
    """The configuration of a workload, and its step."""
    config = load_workload(name, settings_of("triton", "none", 1))
    return config, LayeredRehearsal.of(config, make_stage)


def layer(phase, what):
    """Of a layer of Llama 7B: "kernels", or "bytes" as a share of the ideal's."""
    config, step = rehearsed("hlat_7b")
    counts = step.layer(phase)
    if what == "kernels":
        return counts.num_kernels
    tokens = config.batch.micro_batch_size * config.batch.sequence_length
    u, v = 2 * tokens * config.model.hidden_size, 2 * tokens * config.model.intermediate_size
    return counts.elementwise_bytes / {"layers": 12 * u + 3 * v, "backward": 14 * u + 6 * v}[phase]


def update(name, what):
    _, step = rehearsed(name)
    counts = step.whole.phases["update"]
    if what == "launches a bucket":
        return counts.num_kernels / step.whole.num_buckets
    return counts.elementwise_bytes / step.whole.num_elements


def norm_bytes(name):
    _, step = rehearsed(name)
    return step.whole.phases["norms"].elementwise_bytes / step.whole.num_elements


def logit_bytes(name):
    config, step = rehearsed(name)
    tokens = config.batch.micro_batch_size * config.batch.sequence_length
    return step.whole.phases["head"].elementwise_bytes / (tokens * config.model.vocab_size)


def waits(name):
    return rehearsed(name)[1].whole.total.num_waits


def speed(name):
    config, step = rehearsed(name)
    return estimate_on(config, step.whole, H200).tokens_per_s


def peak_gib(name):
    config, step = rehearsed(name)
    return estimate_on(config, step.whole, H200).peak_gib


AT_MOST = {
    "kernels of a Llama layer, forward": (12, lambda: layer("layers", "kernels"), None),
    "kernels of a Llama layer, backward": (22, lambda: layer("backward", "kernels"), None),
    "bytes of a Llama layer, forward, of 12 u + 3 v": (1.1, lambda: layer("layers", "bytes"), None),
    "bytes of a Llama layer, backward, of 14 u + 6 v": (1.1, lambda: layer("backward", "bytes"), None),
    "kernels of the update, a bucket": (1, lambda: update("hlat_7b", "launches a bucket"), None),
    "bytes of the update, an element": (16, lambda: update("hlat_7b", "bytes"), None),
    "bytes of the norms, an element": (4, lambda: norm_bytes("hlat_7b"), None),
    "bytes of the cross-entropy, a logit, Llama": (8, lambda: logit_bytes("hlat_7b"), None),
    "bytes of the cross-entropy, a logit, GPT-2": (8, lambda: logit_bytes("gpt2_124m"), None),
    "waits of the host, 7B": (1, lambda: waits("hlat_7b"), None),
    "waits of the host, GPT-2": (1, lambda: waits("gpt2_124m"), None),
    "GiB, 7B": (112, lambda: peak_gib("hlat_7b"), None),
}
"""Limit, figure, and where it is not reached yet the figure of today."""

AT_LEAST = {
    "hlat_7b": (13_500, None),
    "llama_1.26b": (63_000, None),
    "gpt2_124m": (520_000, None),
    "gpt2_163m": (450_000, None),
}
"""Tokens/s on an H200, by workload."""


def not_reached(gates, figure):
    """Rows for parametrize; those with a figure of today are expected to fail, and to be cleared once they do not."""
    rows = []
    for name, gate in gates.items():
        today = gate[figure]
        marks = [pytest.mark.xfail(strict=True, reason=f"not reached yet: {today}")] if today else []
        rows.append(pytest.param(name, marks=marks))
    return rows


@pytest.mark.parametrize("name", not_reached(AT_MOST, 2))
def test_no_more_than(name):
    limit, figure, _ = AT_MOST[name]
    assert figure() <= limit


@pytest.mark.parametrize("name", not_reached(AT_LEAST, 1))
def test_predicted_tokens_per_second_on_an_h200(name):
    assert speed(name) >= AT_LEAST[name][0]
