"""`python -m parallel3d COMMAND ...`; as a file it runs from any folder without an installation, as commands do it."""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # not this folder: its names are not top-level modules

from parallel3d.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
