"""`parallel3d study` as a script: see parallel3d/commands/study.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from parallel3d.commands.main import run

if __name__ == "__main__":
    sys.exit(run("study", sys.argv[1:]))
