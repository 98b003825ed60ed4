"""Builds the package: what pyproject.toml describes, with the shipped configurations as parallel3d/configs."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConfigs(build_py):
    """`build_py` that copies configs/ into the package, except into an editable one, which is the checkout itself."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            shutil.copytree(
                Path(__file__).parent / "configs", Path(self.build_lib) / "parallel3d" / "configs", dirs_exist_ok=True
            )


setup(cmdclass={"build_py": BuildWithConfigs})
