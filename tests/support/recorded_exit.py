"""A script in this process, whose exit code is written to a file first: FILE SCRIPT ARGUMENTS.

For launchers that do not pass it on. A process that is killed leaves no file.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path


def main() -> None:
    file, own_pid = Path(sys.argv[1]), os.getpid()
    sys.argv = sys.argv[2:]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if os.getpid() == own_pid:
            file.write_text(str(end.code or 0))
        raise


if __name__ == "__main__":
    main()
