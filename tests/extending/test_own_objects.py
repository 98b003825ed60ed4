"""A rule and a schedule of the user's as "package:object": a file in the current folder is enough, errors name it."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel3d.config.load import dump_config, load_config, resolve
from parallel3d.errors import ConfigError, UserCodeError
from parallel3d.pipeline.instructions import Op
from parallel3d.trainer.learning_rate import build_lr_schedule
from parallel3d.trainer.plans import build_grid, plan_schedule
from parallel3d.worker.main import user_files
from tests.support import tiny_runs

HERE = Path(__file__).parent
RULE, SCHEDULE = f"{HERE}/ademamix.py:RULE", f"{HERE}/eager_1f1b.py:EagerOneFOneB"
DECAY = f"{HERE}/exponential_decay.py:halve_three_times"
SETTINGS = dict(beta1=0.9, beta2=0.999, beta3=0.9999, alpha=4.0, eps=1e-8)


def sections(alpha: float = 4.0, **parallel: object) -> dict[str, Any]:
    rule = dict(kind=RULE, rule_settings={"alpha": alpha}, learning_rate=0.01)
    lr_schedule = dict(kind=DECAY, warmup_steps=0, decay_steps=4)
    parallel_section = dict(schedule=SCHEDULE, **parallel)
    return dict(optimizer=rule, lr_schedule=lr_schedule, parallel=parallel_section, precision=dict(sums="exact"))


def test_they_train_like_one_process() -> None:
    """Exact sums: bit for bit."""
    one, many = (tiny_runs.train_in_threads(**sections(**layout)) for layout in ({}, dict(pp_size=2, dp_size=2)))
    assert one.entries[-1].loss < one.entries[0].loss and many.entries == one.entries
    assert all(torch.equal(many.weights[key], weight) for key, weight in one.weights.items())
    other = tiny_runs.train_in_threads(**sections(alpha=0.5))
    assert not any(torch.equal(other.weights[key], weight) for key, weight in one.weights.items())


def test_they_are_those_of_the_files() -> None:
    config = tiny_runs.make_config(**sections(pp_size=2), batch=dict(global_batch_size=8, num_micro_batches=8))
    assert config.optimizer.settings == SETTINGS and config.optimizer.exp_avg_sq_decay == 0.999
    plan = plan_schedule(config, build_grid(config), 8)
    (_, run), *_ = plan.runs
    assert [op for op, *_ in run.steps[0]].index(Op.BACKWARD) == 3  # 2 * 2 - 1; 1f1b's is 2
    assert [file.name for file in user_files(config)] == ["eager_1f1b.py", "ademamix.py", "exponential_decay.py"]
    schedule, floor = build_lr_schedule(config), config.lr_schedule.min_ratio
    expected = [0.01 * (floor + (1 - floor) * 0.5**exponent) for exponent in (0, 1.5, 3)]
    assert [schedule.at(updates=step, tokens=0) for step in (0, 2, 4)] == pytest.approx(expected)


def test_a_resolved_configuration_loads_again(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(dump_config(tiny_runs.make_config(**sections())))
    again = resolve(load_config(tmp_path / "a.json", ["optimizer.rule_settings.beta3=0.5"]), config_path="a")
    assert again.optimizer.rule_settings == SETTINGS | {"beta3": 0.5} and again.parallel.schedule == SCHEDULE


def test_settings_of_another_rule() -> None:
    wrong = dict(kind=RULE, rule_settings={"alpha": -1.0, "gamma": 1}, beta1=0.5)
    with pytest.raises(ConfigError) as caught:
        tiny_runs.make_config(optimizer=wrong)
    lines = [
        r"optimizer.rule_settings.gamma = 1: is not a setting of .*it has beta1, beta2, beta3, alpha, eps",
        r"optimizer.rule_settings.alpha = -1.0: should be greater than or equal to 0",
        r"optimizer.beta1 = 0.5: .* Set optimizer.rule_settings.beta1 for a rule of your own",
    ]
    assert len(caught.value.problems) == 3
    for line in lines:
        assert re.search(line, str(caught.value))
    with pytest.raises(ConfigError, match=r"rule_settings.alpha = 4.0: is not a setting.*Set it in optimizer itself"):
        tiny_runs.make_config(optimizer=dict(kind="adamw", rule_settings={"alpha": 4.0}))


MINE = """
    from parallel3d.optim.update_rules.adamw import RULE as AdamW
    from parallel3d.optim.update_rules.update_rule import EXP_AVG, EXP_AVG_SQ, UpdateRule
    from parallel3d.pipeline.schedules.schedule import Schedule

    class NoFormula(UpdateRule):
        name, states = "mine", (EXP_AVG,)

    class NoDefault(NoFormula):
        rate: float
        def update_block(self, block, step, *, weight_decay):
            return None

    class TooMany(NoFormula):
        states = (EXP_AVG_SQ,) * 4
        def update_block(self, block, step, *, weight_decay):
            return None

    class OtherAdam(AdamW):
        pass

    class NoFile(AdamW):
        name = "no_file"

    class Stuck(Schedule):
        name = "stuck"
        def in_flight_budgets(self, component):
            return [1 / 0]

    class Half(Schedule):
        name = "half"

    class Wrong(NoFormula):
        def update_block(self, block, step, *, weight_decay):
            block.weight.mul_(self.no_such_setting)

    class Argument(Stuck):
        name = "argument"
        def __init__(self, size):
            self.size = size

    class NoArgument(NoFormula):
        def update_block(self):
            pass

    class NoSizes(Schedule):
        name = "no-sizes"
        def in_flight_budgets(self):
            return []

    def failing():
        raise KeyError("no such thing")

    def forgets(progress):
        return {0.0: 1.0}[progress]

    def grows(progress):
        return 1 + progress

    def breaks_late(progress):
        return 1.0 if progress in (0.0, 0.25, 0.5, 0.75, 1.0) else 1 / 0
"""
MISTAKES = [
    ("optimizer.kind", "mine.py:None", "module 'user_file_mine"),
    ("optimizer.kind", "mine.py:Stuck", "is Stuck, not a subclass of UpdateRule"),
    ("optimizer.kind", "mine.py:failing", "is function, not a subclass of UpdateRule"),
    ("optimizer.kind", "mine.py:NoFormula", "does not define update_block"),
    ("optimizer.kind", "mine.py:NoDefault", "its field rate has no default"),
    ("optimizer.kind", "mine.py:TooMany", "keeps 4 states, of at most 3; keeps EXP_AVG_SQ, but has no field beta2"),
    ("optimizer.kind", "mine.py:OtherAdam", "has the name of another rule, 'adamw'"),
    ("optimizer.kind", "mine.py:NoFile", r"sets has_c_formula, but c_no_file\.c is not beside its file"),
    ("optimizer.kind", "nowhere", "should be 'adamw', 'lion' or 'muon', or name an object of yours"),
    ("parallel.schedule", "nowhere:X", "ModuleNotFoundError.*Name module:object with a module in this folder"),
    ("parallel.schedule", "broken.py:X", r"broken\.py, line 2, in <module> \(1 / 0\): ZeroDivisionError"),
    (
        "parallel.schedule",
        "mine.py:Wrong",
        "is Wrong, not a Schedule of parallel3d.pipeline.schedules.schedule with a name",
    ),
    ("parallel.schedule", "mine.py:Half", "TypeError: Can't instantiate abstract class Half"),
    ("parallel.schedule", "mine.py:Argument", r"mine\.py, line 37: TypeError: Argument.__init__\(\) missing 1"),
    ("lr_schedule.kind", "cosin", "should be 'constant', 'linear', 'cosine' or '1-sqrt', or name an object of yours"),
    ("lr_schedule.kind", "mine.py:failing", r"mine\.py, line 51: TypeError: failing\(\) takes 0 positional arguments"),
    ("lr_schedule.kind", "mine.py:forgets", r"mine\.py, line 55, in forgets .*KeyError: 0.25"),
    ("lr_schedule.kind", "mine.py:grows", "1.25 at progress 0.25 is not a share from 0 to 1"),
    ("lr_schedule.kind", "math:sqrt", "TypeError"),
]


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a user's files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(textwrap.dedent(MINE))
    (tmp_path / "broken.py").write_text("\n1 / 0\n")
    return tmp_path


@pytest.mark.parametrize("field, value, expected", MISTAKES)
def test_what_is_none_is_named(mine: Path, field: str, value: str, expected: str) -> None:
    (mine / "a.json").write_text(dump_config(tiny_runs.make_config()))
    with pytest.raises(ConfigError, match=f"{field} = '{re.escape(value)}': .*{expected}") as caught:
        load_config("a.json", [f"{field}={value}"])
    assert len(caught.value.problems) == 1


def test_errors_of_its_methods_name_its_line(mine: Path) -> None:
    config = tiny_runs.make_config(parallel=dict(schedule="mine.py:Stuck", pp_size=2))
    with pytest.raises(UserCodeError, match=r"parallel.schedule mine.py:Stuck: .*mine.py, line 28, .*ZeroDivision"):
        plan_schedule(config, build_grid(config), 4)
    with pytest.raises(
        UserCodeError, match=r"optimizer.kind mine: .*mine.py, line 35, in update_block .*no_such_setting"
    ):
        tiny_runs.train_in_threads(optimizer=dict(kind="mine.py:Wrong"))
    own = tiny_runs.make_config(lr_schedule=dict(kind="mine.py:breaks_late", warmup_steps=0, decay_steps=3))
    with pytest.raises(UserCodeError, match=r"lr_schedule.kind mine.py:breaks_late: .*mine.py, line 61, .*ZeroDiv"):
        build_lr_schedule(own).at(updates=1, tokens=0)


def test_a_method_that_takes_other_arguments_is_the_users(mine: Path) -> None:
    config = tiny_runs.make_config(parallel=dict(schedule="mine.py:NoSizes", pp_size=2))
    expected = r"parallel.schedule mine.py:NoSizes: .*mine.py, line 48: TypeError: NoSizes.in_flight_budgets\(\) takes"
    with pytest.raises(UserCodeError, match=expected):
        plan_schedule(config, build_grid(config), 4)
    expected = r"optimizer.kind mine: .*mine.py, line 43: TypeError: NoArgument.update_block\(\) got"
    with pytest.raises(UserCodeError, match=expected):
        tiny_runs.train_in_threads(optimizer=dict(kind="mine.py:NoArgument"))
