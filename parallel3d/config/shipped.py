"""The configurations that come with the project: configs/ of a checkout, which a wheel holds as parallel3d/configs."""

from __future__ import annotations

from pathlib import Path, PurePath

PACKAGE = Path(__file__).resolve().parent.parent
SCHEMA = "schema.json"


def shipped_folder() -> Path:
    """The folder of the configurations: in the package where it is installed, beside it in a checkout."""
    installed = PACKAGE / "configs"
    return installed if installed.is_dir() else PACKAGE.parent / "configs"


def shipped_configs() -> dict[str, Path]:
    """The file of each configuration that comes with the project, by name (`quickstart`)."""
    return {path.stem: path for path in sorted(shipped_folder().glob("*.json")) if path.name != SCHEMA}


def find_config(name: str) -> Path:
    """The configuration's path: `name` itself if there is such a file, otherwise the one shipped under this name.

    `quickstart`, `quickstart.json` and `configs/quickstart.json` name the same shipped configuration, also where a
    folder has that name. A name without a file comes back as it is: reading it reports what is missing.
    """
    path = Path(name)
    is_file = path.exists() and not path.is_dir()
    known = PurePath(name).parent.as_posix() in (".", "configs")
    return path if is_file or not known else shipped_configs().get(path.name.removesuffix(".json"), path)
