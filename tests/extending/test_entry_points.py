"""Rules, schedules and families of installed packages: found by their entry points, named when they can't be used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.extending.copies import ROOT

EXTENDING = Path(__file__).parent
FILES = {"update_rules": "ademamix", "schedules": "eager_1f1b", "families": "starcoder2"}
NAMES = {"update_rules": "RULE", "schedules": "SCHEDULE", "families": "FAMILY"}
SCRIPT = """
import json, warnings
with warnings.catch_warnings(record=True) as caught:
    from parallel3d.config.schema import Config
    from parallel3d.config.load import load_config, resolve
import sys
config = resolve(load_config(sys.argv[1], ["optimizer.beta3=0.5"]), config_path="a")
found = [config.optimizer.kind, config.optimizer.beta3, config.parallel.schedule, config.model.architecture]
print(json.dumps([*found, "torch" in sys.modules, [str(each.message) for each in caught]]))
"""


def test_a_package_brings_a_rule_a_schedule_and_a_family(tmp_path: Path) -> None:
    """Those of docs/extending.md, as the modules of another package; no torch is imported for them."""
    site, info = tmp_path / "site", tmp_path / "site" / "mine-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    groups = [f"[parallel3d.{group}]\nmine = mine_{file}:{NAMES[group]}\n" for group, file in FILES.items()]
    broken = "[parallel3d.schedules]\nmine = mine_eager_1f1b:SCHEDULE\nbroken = mine_broken:SCHEDULE\n"
    (info / "entry_points.txt").write_text("\n".join([groups[0], broken, groups[2]]))
    for file in FILES.values():
        (site / f"mine_{file}.py").write_text((EXTENDING / f"{file}.py").read_text())
    (site / "mine_broken.py").write_text("\n1 / 0\n")
    config = {
        "model": dict(
            architecture="starcoder2",
            vocab_size=9,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
        ),
        "parallel": {"schedule": "eager-1f1b", "pp_size": 2},
        "batch": {"sequence_length": 8, "global_batch_size": 4, "micro_batch_size": 1},
        "optimizer": {"kind": "ademamix", "learning_rate": 0.1},
        "run": {"num_steps": 2},
    }
    (tmp_path / "a.json").write_text(json.dumps(config))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(site)])}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "a.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    *found, has_torch, warnings = json.loads(done.stdout)
    assert found == ["ademamix", 0.5, "eager-1f1b", "starcoder2"] and not has_torch
    (warning,) = warnings
    assert "parallel3d.schedules: broken = mine_broken:SCHEDULE" in warning
    assert "mine_broken.py, line 2" in warning and "ZeroDivisionError" in warning
