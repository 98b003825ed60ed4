"""A real run whose membership changes: groups of undamaged stages keep their connections, and no bit changes."""

import json

import pytest

from tests.support.launch_runs import finish, metrics, start

SETTINGS = (
    "parallel.dp_size=3",
    "parallel.zero_stage=0",  # no gather of weights is under way between two steps
    "precision.sums=exact",
    "run.num_steps=200",
    "batch.global_batch_size=6",
)


TERM = [{"rank": 4, "step": 3, "kind": "term"}]
"""It leaves after step 3, at a boundary."""
KILL = [
    {"rank": 4, "step": 2, "phase": "all_gather"},
    *({"rank": rank, "step": 3, "phase": "load", "kind": "sleep", "seconds": 2.0} for rank in (0, 1, 2)),
]
"""It is killed at the end of step 2, and the ranks of the other stage have not done anything in step 3 yet."""


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.sample(0, rest=1)
@pytest.mark.parametrize("faults, exchange", [(TERM, "auto"), (KILL, "gloo")], ids=["drain", "kill"])
def test_the_ranks_of_an_undamaged_stage_keep_their_connections(config_file, tmp_path, faults, exchange):
    """Rank 4 is lost while stage 0's three ranks are between the same two collectives."""
    losses = {}
    for name, injected in (("undisturbed", []), ("disturbed", faults)):
        run = tmp_path / name
        faulty = (f"run.directory={run}", f"elastic.faults={json.dumps(injected)}", f"run.exchange={exchange}")
        code, out, err = finish(start("--config", config_file, *SETTINGS, *faulty))
        assert code == 0, out + err
        losses[name] = [line["loss"] for line in metrics(run)]
    assert losses["disturbed"] == losses["undisturbed"] and len(losses["disturbed"]) == 200
    logs = [path.read_text(errors="replace") for path in sorted((tmp_path / "disturbed" / "logs").rglob("*"))]
    kept = [line for text in logs for line in text.splitlines() if "keeps the connections of" in line]
    assert len(kept) == 3, kept
    assert all(line.startswith("generation1/dp/stage0/tp0 keeps the connections of generation0/dp/") for line in kept)
