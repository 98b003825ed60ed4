from __future__ import annotations

import json
import platform
import subprocess
import sys


def test_the_environment_is_described_without_torch():
    script = "import json, sys; from parallel3d.monitor.environment import describe_environment as describe; "
    script += "print(json.dumps(describe(['train', '--x']))); assert 'torch' not in sys.modules"
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    assert answer.returncode == 0, answer.stderr
    facts = json.loads(answer.stdout)
    assert facts["command_line"] == ["train", "--x"]
    assert facts["python"] == platform.python_version()
    assert facts["packages"]["torch"] and facts["num_cores"] >= 1 and facts["memory_bytes"] > 2**28
