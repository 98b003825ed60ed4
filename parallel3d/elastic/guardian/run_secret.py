"""The secret that all processes of a run share, and how it reaches them.

given               PARALLEL3D_SECRET, any words, in the environment of every process that a launcher starts
without a launcher  made by the coordinator's process
torchrun            made by rank 0's coordinator process, put into torchrun's store next to the coordinator's address
other launchers     made by rank 0, in the file .secret (mode 600) of the run's directory, which all hosts share
train.py --join     in that file, which is written under all launchers unless the secret is given
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from parallel3d.elastic.guardian.launcher_env import SECRET_VARIABLE, LauncherEnv
from parallel3d.handshake import SECRET_BYTES, NotOfThisRunError, new_secret

FILE_NAME = ".secret"


class RunSecret:
    """One process's knowledge of the run's secret: `value` if another process of this host has found it."""

    def __init__(self, env: LauncherEnv | None, directory: Path, *, value: bytes | None = None):
        self._file: Path | None = None
        self._directory = directory
        self._is_given = env is not None and env.secret != ""
        self._value = value
        if value is not None:
            return
        given = "" if env is None else env.secret
        self._value = hashlib.sha256(given.encode()).digest() if given else None
        is_maker = env is None or env.rank == 0
        has_file = self._value is None and env is not None and not env.agent_store
        if self._value is None and is_maker:
            self._value = new_secret()
        if has_file:
            self._file = directory / FILE_NAME
            if is_maker and self._value is not None:
                _write(self._file, self._value)

    @property
    def known(self) -> bytes | None:
        """The secret, if it is not one that a file may still replace."""
        return self._value

    def read(self) -> bytes:
        """Returns the secret. A file is read each time: it may be an earlier run's until rank 0 has written this run's.

        Raises NotOfThisRunError while the secret is not known.
        """
        if self._value is not None:
            return self._value
        try:
            value = b"" if self._file is None else self._file.read_bytes()
        except OSError as error:
            raise NotOfThisRunError(
                f"can't read the run's secret, {self._file}: {error.strerror}. If the hosts don't share this folder, "
                f"set {SECRET_VARIABLE} to the same words on all of them"
            ) from None
        if len(value) != SECRET_BYTES:
            raise NotOfThisRunError("the run's secret is not known here")
        return value

    def write(self) -> None:
        """Writes the secret to its file, unless it is there or given: those who join the run by a command read it."""
        if not (self._is_given or self._file):
            _write(self._directory / FILE_NAME, self.read())

    def set(self, value: bytes) -> None:
        """Keeps the secret that has proved right, or came from the launcher's store."""
        self._value = value


def _write(path: Path, value: bytes) -> None:
    path.unlink(missing_ok=True)  # of an earlier run, with whatever mode
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(value)
