"""What benchmarks/small_gpt.py measures and writes, and that its training loop survives a loss."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.drop_in_faults import run_with_faults
from benchmarks.llm_faults import describe, read_report
from benchmarks.small_gpt import (
    CONTEXT,
    VOCABULARY,
    SmallGpt,
    evaluating,
    generate,
    loss_of,
    perplexity,
    split_text,
    validation_loss,
)

ROOT = Path(__file__).parents[1]


def make_model(scale: float = 2.0) -> SmallGpt:
    """Freshly drawn weights, the embedding times `scale`."""
    torch.manual_seed(0)
    model = SmallGpt()
    with torch.no_grad():
        model.embedding.weight.mul_(scale)
    return model


def test_a_uniform_model_has_the_perplexity_of_the_vocabulary() -> None:
    model = make_model(scale=0.0)
    text, logs = generate(model, b"a", length=20, top_k=VOCABULARY, seed=0)
    assert len(text) == len(logs) == 20
    assert perplexity(logs) == pytest.approx(VOCABULARY)


def test_only_the_likeliest_are_drawn() -> None:
    model = make_model()
    greedy, logs = generate(model, b"prompt", length=80, top_k=1, seed=0)
    assert generate(model, b"prompt", length=80, top_k=1, seed=1) == (greedy, logs)
    ids = list(b"prompt")
    with evaluating(model):
        for byte, log in zip(greedy, logs):
            probabilities = model(torch.tensor([ids[-CONTEXT:]]))[0, -1].log_softmax(0)
            assert (byte, log) == (int(probabilities.argmax()), probabilities.max().item())
            ids.append(byte)
    several = {generate(model, b"prompt", length=20, top_k=3, seed=seed)[0] for seed in range(4)}
    assert len(several) > 1
    first = {text[0] for text in several}
    with evaluating(model):
        assert first <= set(model(torch.tensor([list(b"prompt")]))[0, -1].topk(3).indices.tolist())


def test_evaluation_has_no_dropout_and_training_has() -> None:
    model, windows = make_model(), torch.arange(3 * (CONTEXT + 1)).view(3, -1) % VOCABULARY
    assert model.training and loss_of(model, windows).item() != loss_of(model, windows).item()
    first = validation_loss(model, windows, batch=2)
    assert first == validation_loss(model, windows, batch=2) and model.training
    with evaluating(model):
        assert first == pytest.approx(loss_of(model, windows).item())
    assert generate(model, b"a", length=5, top_k=3, seed=0) == generate(model, b"a", length=5, top_k=3, seed=0)


def test_no_token_is_in_both_parts_of_a_text() -> None:
    text = bytes(index % 251 for index in range(10 * (20 * CONTEXT + 1)))
    training, validation = split_text(text)
    assert (len(training), len(validation)) == (180, 20)
    assert bytes(training[-1].tolist()) == text[179 * CONTEXT : 180 * CONTEXT + 1]
    assert bytes(validation[0].tolist()) == text[len(text) * 9 // 10 :][: CONTEXT + 1]


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.sample(0, rest=1)
@pytest.mark.parametrize("mode", ["redo", "drop"])
def test_the_training_loop_survives_a_loss(tmp_path: Path, mode: str) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(index * index % 97 for index in range(60_000)))
    arguments = [f"--text={text}", "--steps=12"]
    _, out = run_with_faults(ROOT / "benchmarks/llm_loop.py", arguments, [])
    calm = read_report(out)
    _, out = run_with_faults(ROOT / "benchmarks/llm_loop.py", [*arguments, f"--mode={mode}"], [(4, 1)])
    assert (read_report(out) == calm) == (mode == "redo")
    assert calm["num_parameters"] == 1_049_184
    table = describe({"no fault": [calm], "redo": [calm], "drop": [read_report(out)]})
    assert sum(line.startswith("| ") for line in table) == 4
