"""How a rank enters a run whose membership never changes."""

from parallel3d.elastic.protocol.membership import GenerationRecord
from parallel3d.inprocess.world import ThreadWorld
from parallel3d.trainer.context import Transports
from parallel3d.trainer.generation import start_rank
from parallel3d.trainer.plans import build_grid
from tests.support import tiny_runs


def test_the_leader_is_the_one_of_the_generation_records_rule(monkeypatch):
    config = tiny_runs.make_config()
    grid, world = build_grid(config), ThreadWorld(1)
    for leader in (0, 7):
        rank = tiny_runs.prepare(config, grid, 0)
        start_rank(rank, grid, Transports(make_group=world.make_group(0), links=world.links(0), token=world.tokens[0]))
        assert rank.current.leader == leader
        monkeypatch.setattr(GenerationRecord, "leader", 7)
