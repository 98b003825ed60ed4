from __future__ import annotations

import json
import os
import platform
import subprocess
import sys


def test_the_environment_is_described_without_torch(tmp_path):
    script = "import json, sys; from parallel3d.monitor.environment import describe_environment as describe; "
    words = ["train", "--x", 'a=["https://me:pw@h/t?sig=f00"]', "s3://b/?.txt"]
    script += f"print(json.dumps(describe({words}))); assert 'torch' not in sys.modules"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "API_KEY": "of-nobody-else"}
    command = [sys.executable, "-c", script]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path, env=env)
    assert answer.returncode == 0, answer.stderr
    facts = json.loads(answer.stdout)
    assert facts["command_line"] == ["train", "--x", 'a=["https://...@h/t?..."]', "s3://b/?.txt"]
    assert facts["working_directory"] == str(tmp_path) and "of-nobody-else" not in answer.stdout
    assert facts["python"] == platform.python_version()
    assert facts["packages"]["torch"] and facts["num_cores"] >= 1 and facts["memory_bytes"] > 2**28
