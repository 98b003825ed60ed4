"""Workers of real training leave by a command and others join: no loss changes by a bit."""

import pytest

from tests.launch.test_returning_workers import SETTINGS, changes, stop_after
from tests.support.launch_runs import finish, metrics, start, wait_for_change, wait_for_step

pytestmark = [pytest.mark.slow, pytest.mark.full]


def drain(run, what):
    return finish(start("--config", run / "config.json", "--drain", what))


def test_a_run_with_relative_paths_is_reached_from_any_folder(config_file, tmp_path, monkeypatch, text):
    """Its text, its cache and its own folder are relative to where it was started."""
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    (home / "text.txt").write_text(text.read_text())
    monkeypatch.chdir(home)
    relative = ('data.sources=["text.txt"]', "data.cache_directory=cache", "run.directory=runs/one")
    process = start("--config", config_file, *SETTINGS, *relative, "elastic.max_rejoins=0")
    run = home / "runs" / "one"
    wait_for_step(run, 4)
    monkeypatch.chdir(elsewhere)
    code, out, err = drain(run, "rank=3")
    assert (code, err) == (0, "") and "rank 3 (pp1 dp1 tp0) leaves" in out
    wait_for_change(run, 1)
    guest = start("--config", run / "config.json", "--join")
    wait_for_change(run, 2)
    losses, _ = stop_after(process, run, 3)
    assert finish(guest)[0] == 130 and len(losses) > 6
    assert [[each["rank"] for each in change["joined"]] for change in changes(run)] == [[], [4]]
    assert not list(elsewhere.iterdir())


def test_a_replica_leaves_by_a_command_and_another_worker_joins(config_file, tmp_path):
    run, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    process = start("--config", config_file, *SETTINGS, "elastic.max_rejoins=3")
    wait_for_step(run, 4)
    code, out, err = drain(run, "stage=1,replica=1")
    assert (code, err) == (0, "") and out.startswith("rank 3 (pp1 dp1 tp0) leaves at the next step boundary, after")
    wait_for_change(run, 1)
    code, out, err = drain(run, "rank=2")
    assert (code, out) == (2, "") and "nothing leaves: the run needs rank=2: without, stage 1 has no replica" in err
    wait_for_step(run, len(metrics(run)) + 3)
    guest = start("--config", run / "config.json", "--join")
    wait_for_change(run, 2)
    wait_for_step(run, len(metrics(run)) + 3)
    code, out, _ = drain(run, "rank=4")
    assert code == 0 and finish(guest)[0] == 0, out
    wait_for_change(run, 3)
    losses, out = stop_after(process, run, 3)
    assert not any("num_attempts" in line for line in metrics(run)), "a step was begun twice"
    assert [change["live"] for change in changes(run)] == [3, 4, 3]
    assert "stage=1,replica=1 by command: rank 3 (pp1 dp1 tp0) leaves" in out
    process = start("--config", config_file, *SETTINGS, f"run.directory={undisturbed}")
    wait_for_step(undisturbed, len(losses) - 3)
    others, _ = stop_after(process, undisturbed, 3)
    assert min(len(losses), len(others)) > 6 and all(ours == theirs for ours, theirs in zip(losses, others))
