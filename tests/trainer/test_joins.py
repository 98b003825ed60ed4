"""Workers die and new ones join: the run is bit for bit the undisturbed one, and at the end at full width."""

from __future__ import annotations

import pytest

from parallel3d.config.schema import Config, FaultConfig
from parallel3d.monitor.flops import Peak
from parallel3d.trainer.joining import encode_train_state, load_train_state
from parallel3d.trainer.plans import build_grid
from parallel3d.trainer.seen_steps import MAX_SENT_LOSSES, SeenSteps
from tests.support import tiny_runs
from tests.support.join_runs import check_joins, dies
from tests.support.kill_layouts import BASE_LAYOUTS, BEFORE_GO, config_of
from tests.trainer.test_join_rows import muon

STEPS = 5
PHASES = (*BEFORE_GO, "recovery_groups")


def test_a_joiner_knows_what_its_run_has_seen():
    """It may become the leader, whose figures are the run's."""
    config = config_of("pp2-dp4")
    one, other = (tiny_runs.prepare(config, build_grid(config), rank) for rank in (0, 1))
    one.peak, one.resumed_from = Peak(flops_per_s=2e12, source="measured"), 3
    one.history = SeenSteps(losses={4: 2.5, 5: 2.25}, training_s=0.5, timed_tokens=256, timed_flops=1e9)
    load_train_state(other, encode_train_state(one))
    assert (other.history, other.peak, other.resumed_from) == (one.history, one.peak, 3)
    one.history.losses = {step: 1.0 for step in range(2 * MAX_SENT_LOSSES)}
    load_train_state(other, encode_train_state(one))
    assert list(other.history.losses) == list(range(MAX_SENT_LOSSES, 2 * MAX_SENT_LOSSES))


COORDINATES = [(name, rank) for name in BASE_LAYOUTS for rank in build_grid(config_of(name)).ranks]


@pytest.mark.each_value(rest=10)
@pytest.mark.parametrize(("layout", "rank"), COORDINATES)
def test_every_place_is_taken_again(layout: str, rank: int):
    check_joins(config_of(layout, num_steps=STEPS), [dies(rank, 2)], [3], num_changes=2)


@pytest.mark.parametrize(
    ("rank", "phase"),
    [(rank, phase) for rank in (8, 0, 5) for phase in PHASES],
    ids=lambda value: {8: "joiner", 0: "source", 5: "bystander"}.get(value, value),
)
def test_a_death_while_a_worker_joins(rank: int, phase: str):
    """Rank 1 dies, rank 8 joins its stage, meanwhile one more dies; rank 9 takes the last vacancy."""
    faults = [dies(1, 1), FaultConfig(rank=rank, step=1 if rank == 8 else 3, phase=phase)]
    changes = 3 if phase in BEFORE_GO else 4
    check_joins(config_of("pp2-dp4", num_steps=STEPS), faults, [2, 4], num_changes=changes)


WIDE = config_of("pp2-dp4", num_steps=STEPS)
ZERO_0 = config_of("pp2-dp4", num_steps=STEPS, zero_stage=0)
ROUNDED, TIED, TP2 = (config_of(name, num_steps=STEPS) for name in ("bf16_sr-pp2-dp4", "tied-pp2-dp4", "dp3-tp2"))
MUON = muon("pp2-dp4", "fp32")

THIRD_DEATHS: dict[str, tuple[Config, int, int, str]] = {
    **{f"range-source-{phase}": (WIDE, 1, 2, phase) for phase in PHASES},
    **{f"joiner-of-stage-1-{phase}": (WIDE, 5, 8, phase) for phase in PHASES},
    **{f"range-source-of-stage-1-{phase}": (WIDE, 5, 6, phase) for phase in PHASES},
    "source-of-another-stage": (WIDE, 5, 0, "recovery_moves"),
    "joiner-builds": (WIDE, 1, 8, "build"),
    "tp2-joiner": (TP2, 1, 6, "recovery_moves"),
    "tp2-source": (TP2, 1, 2, "recovery_moves"),
    "tp2-range-source": (TP2, 1, 4, "recovery_confirm"),
    "zero0-source": (ZERO_0, 1, 0, "recovery_moves"),
    "zero0-joiner": (ZERO_0, 5, 8, "recovery_confirm"),
    "bf16_sr-range-source": (ROUNDED, 1, 3, "recovery_moves"),
    "bf16_sr-joiner": (ROUNDED, 5, 8, "recovery_groups"),
    "muon-range-source": (MUON, 1, 2, "recovery_moves"),
    "muon-joiner": (MUON, 1, 8, "recovery_confirm"),
    "tied-range-source-of-the-other-end": (TIED, 1, 6, "recovery_moves"),
    "tied-joiner": (TIED, 5, 8, "recovery_moves"),
    "tied-source": (TIED, 5, 0, "recovery_confirm"),
}
"""Configurations, who dies first, who dies while a worker joins in its place, and in which phase."""


@pytest.mark.sample(2, rest=6)
@pytest.mark.parametrize("name", THIRD_DEATHS)
def test_more_deaths_while_a_worker_joins(name: str):
    """As above: of those that send ranges and not the train state, on another stage than the source, and otherwise."""
    config, first, third, phase = THIRD_DEATHS[name]
    is_joiner = third == len(build_grid(config).ranks)
    faults = [dies(first, 1), FaultConfig(rank=third, step=1 if is_joiner else 3, phase=phase)]
    changes = {"build": 2, "recovery_groups": 4}.get(phase, 3)
    done = check_joins(config, faults, [2, 4], num_changes=changes)
    assert set(done.dead) == {first} | ({third} if not is_joiner else set())  # of the first grid


@pytest.mark.parametrize(("first", "second"), [(0, 3), (2, 1), (4, 7)])
def test_two_broken_replicas_become_a_whole_one(first: int, second: int):
    """The second dies in the recovery from the first: no replica of their stage is whole, but of each part one is."""
    faults = [dies(first, 2), dies(second, 2, "recovery_report")]
    check_joins(config_of("pp2-dp2-tp2", num_steps=STEPS), faults, [], num_changes=1, lacks=1)


def test_a_spare_and_a_new_worker_make_a_replica():
    """Rank 0 dies and leaves spare 1; then rank 2 would be the last of its part."""
    faults = [dies(0, 2), dies(3, 4)]
    check_joins(config_of("pp2-dp2-tp2", num_steps=6), faults, [3, 5], num_changes=4)
