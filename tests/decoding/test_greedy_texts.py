"""The likeliest texts of checkpoints of real layouts: transformers' tokens, on one process and on others, with a cache
and without. The weights are random enough (standard deviation 0.2) for texts that are no repetitions."""

from __future__ import annotations

import pytest
import torch

from parallel3d.commands.convert import main as convert
from parallel3d.commands.trained_model import continue_prompts, open_trained
from parallel3d.config.inference import inference_config
from parallel3d.decoding.rank_decoder import DecodingRule, RankDecoder
from parallel3d.decoding.sampling import SamplingRule
from parallel3d.decoding.texts import EndRule, Prompt
from parallel3d.errors import ConfigError, UserError
from tests.support import tiny_runs
from tests.support.family_shapes import FAMILY_SHAPES
from tests.support.saved_layouts import run_layout, save

NUM_NEW, POSITIONS = 14, 32
FAMILIES = {
    "llama": dict(num_key_value_heads=2),
    "mistral": dict(architecture="mistral", num_key_value_heads=2, sliding_window=5),
    "gpt2": dict(architecture="gpt2", tie_word_embeddings=True),
    **FAMILY_SHAPES,
}
LAYOUTS = ["tp1", "tp2.pp2", "pp4", "tp4.dp2"]
LENGTHS = (3, 9, 1, 5, 12)
"""Of the prompts: shorter and longer than windows of 5."""


def greedy(batch_size=3, **changes):
    end = EndRule(max_tokens=NUM_NEW, **{k: v for k, v in changes.items() if k == "end_ids"})
    others = {k: v for k, v in changes.items() if k == "uses_cache"}
    return DecodingRule(sampling=SamplingRule(), end=end, batch_size=batch_size, **others)


def prompts():
    random = torch.Generator().manual_seed(7)
    return [Prompt(ids=tuple(torch.randint(256, (n,), generator=random).tolist())) for n in LENGTHS]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """By family: a checkpoint of a step on 2 x 2 x 2 ranks, and the Hugging Face folder of the same."""
    made = {}

    def make(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            config = tiny_runs.make_config(
                model=dict(initializer_range=0.2, max_position_embeddings=POSITIONS, **FAMILIES[name]),
                parallel=dict(tp_size=2, pp_size=2, dp_size=2),
                precision=dict(policy="fp32"),
                batch=dict(global_batch_size=4, micro_batch_size=1, sequence_length=16),
            )
            _, snapshots, runtimes = run_layout(config, steps=1)
            checkpoint = save(folder, snapshots, runtimes[0])
            assert convert(["to-hf", str(checkpoint), str(folder / "hf")]) == 0
            made[name] = checkpoint, folder / "hf"
        return made[name]

    return make


def run(folder, layout, rule, asked=None):
    trained = open_trained(folder)
    config = inference_config(trained.model, layout=layout, policy="fp32", sequence_length=max(LENGTHS) + NUM_NEW)
    return continue_prompts(config, trained, asked or prompts(), rule, torch.device("cpu"))


def their_texts(folder):
    """(tokens, perplexity of them) of each prompt, one by one."""
    from transformers import AutoModelForCausalLM  # takes seconds to import

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    found = []
    for prompt in prompts():
        ids = torch.tensor([prompt.ids])
        settings = dict(max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
        done = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        with torch.no_grad():
            logits = model(done).logits[0, len(prompt.ids) - 1 : -1].double()
        new = done[0, len(prompt.ids) :]
        mean = torch.nn.functional.cross_entropy(logits, new)
        found.append((new.tolist(), float(mean.exp())))
    return found


@pytest.mark.each_value(rest=5)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_tokens_and_their_perplexity_are_transformers(folders, name, layout):
    """A wrong tie of two logits would need a difference below 1e-5 of the largest."""
    checkpoint, hf = folders(name)
    theirs = their_texts(hf)
    assert len({token for tokens, _ in theirs for token in tokens}) > 5
    for folder in (checkpoint, hf):
        ours = run(folder, layout, greedy())
        assert [text.ids for text in ours] == [tokens for tokens, _ in theirs]
        assert [text.perplexity for text in ours] == pytest.approx([value for _, value in theirs], rel=1e-4)
        assert {text.reason for text in ours} == {"length"}


@pytest.mark.each_value(rest=4)
@pytest.mark.parametrize("layout", ["tp1", "tp2.pp2"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_with_a_cache_are_those_without(folders, name, layout, monkeypatch):
    """All logits of all steps, by prompt and length of the text; fp32, 1e-5 of the largest."""
    with_cache, without = (recorded_logits(monkeypatch, folders(name)[0], layout, each) for each in (True, False))
    assert with_cache.keys() == without.keys() and len(without) == len(LENGTHS) * NUM_NEW
    for key, right in without.items():
        assert (with_cache[key] - right).abs().max() < 1e-5 * right.abs().max(), key


def recorded_logits(monkeypatch, folder, layout, uses_cache):
    seen, choose = {}, RankDecoder._choose

    def record(self, step, logits):
        for text, row in zip(step.texts, logits):
            seen[text.prompt.ids, len(text.ids)] = row.clone()
        return choose(self, step, logits)

    with monkeypatch.context() as patched:
        patched.setattr(RankDecoder, "_choose", record)
        run(folder, layout, greedy(uses_cache=uses_cache))
    return seen


@pytest.mark.parametrize("layout", ["tp1", "tp2.pp2", "dp2"])
def test_draws_depend_on_neither_layout_nor_batch(folders, layout):
    sampling = SamplingRule(temperature=0.9, top_k=50, top_p=0.95, seed=3)

    def texts(layout, batch_size, asked):
        rule = DecodingRule(sampling=sampling, end=EndRule(max_tokens=NUM_NEW), batch_size=batch_size)
        return [text.ids for text in run(folders("gemma2")[0], layout, rule, asked)]

    right = texts("tp1", 8, prompts())
    assert texts(layout, 2, prompts()) == right
    assert texts(layout, 1, prompts()[1:2]) == right[1:2]
    again = [Prompt(ids=prompt.ids, sample=1) for prompt in prompts()]
    assert texts("tp1", 8, again) != right


def test_a_text_ends_and_gives_its_place_to_another(folders):
    """Each prompt's fourth token ends texts: they end at its first occurrence, in batches of any size."""
    whole = [text.ids for text in run(folders("llama")[0], "tp1", greedy())]
    end_ids = frozenset(ids[3] for ids in whole)
    lengths = [next(i for i, token in enumerate(ids) if token in end_ids) + 1 for ids in whole]
    assert len(set(lengths)) > 1
    for batch_size, layout in ((1, "tp1"), (5, "tp1"), (2, "tp2.pp2"), (5, "tp2.pp2")):
        ours = run(folders("llama")[0], layout, greedy(batch_size, end_ids=end_ids))
        assert [text.ids for text in ours] == [ids[:length] for ids, length in zip(whole, lengths)]
        assert {text.reason for text in ours} == {"eos"}


def test_a_layout_that_does_not_fit_is_refused(folders):
    model = open_trained(folders("llama")[0]).model
    for layout, error, said in (
        ("tp3", ConfigError, "tp_size"),
        ("tp2.sp", UserError, "consists of tp, pp and dp here"),
        ("pp9", ConfigError, "stages"),
    ):
        with pytest.raises(error, match=said):
            inference_config(model, layout=layout, policy="fp32", sequence_length=16)
