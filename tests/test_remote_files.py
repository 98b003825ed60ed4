"""What is said of errors of drivers: enough to act on, and nothing of their text, which may quote credentials."""

from __future__ import annotations

import errno
import socket
import ssl
import tomllib
import traceback
from pathlib import Path

import pytest

from parallel3d import remote_files
from parallel3d.errors import DataError
from parallel3d.monitor.trackers import TRACKERS
from parallel3d.parallel.abort import AbortToken

SECRET = "AKIA5SECRET0KEY99XYZ"


class StoreError(Exception):
    def __init__(self, code: object):
        super().__init__(f"An error occurred: {SECRET}")
        self.response = {"Error": {"Code": code, "Message": SECRET}}


@pytest.mark.parametrize(
    "secret",
    [SECRET, "hf_abcdefghijklmnop", "password=0123456789", "sig=abc%2Fdef", "Bearer ya29.a0af-short", "s3://me:pw@host"],
)
def test_nothing_of_a_drivers_own_text_is_said(secret):
    assert remote_files.problem_of(OSError(f"token {secret} was refused")) == "OSError"
    assert remote_files.problem_of(StoreError(secret)) == "StoreError"
    try:
        try:
            raise ConnectionResetError(errno.ECONNRESET, secret)
        except OSError as cause:
            raise ValueError(secret) from cause
    except ValueError as error:
        expected = "ValueError, by ConnectionResetError (Connection reset by peer)"
        assert remote_files.problem_of(error) == expected


def test_what_a_store_or_the_system_says_is_said():
    assert remote_files.problem_of(StoreError("NoSuchBucket")) == "StoreError NoSuchBucket"
    assert remote_files.problem_of(OSError(errno.ENOSPC, "of a driver")) == "OSError (No space left on device)"


@pytest.mark.parametrize(
    "error, expected",
    [
        (socket.gaierror(socket.EAI_NONAME, SECRET), "gaierror (the name of the host can't be resolved)"),
        (ssl.SSLError(1, SECRET), "SSLError (no agreement on TLS with the host)"),
        (
            ssl.SSLCertVerificationError(1, SECRET),
            "SSLCertVerificationError (the certificate of the host can't be verified)",
        ),
        (OSError(-2, SECRET), "OSError"),
        (ConnectionRefusedError(errno.ECONNREFUSED, SECRET), "ConnectionRefusedError (Connection refused)"),
        (TimeoutError(SECRET), "TimeoutError"),
    ],
)
def test_numbers_that_are_not_the_systems_have_words_of_their_own(error: OSError, expected: str):
    assert remote_files.problem_of(error) == expected


@pytest.mark.parametrize("error", [FileNotFoundError, PermissionError, ConnectionError, ValueError])
def test_no_traceback_has_a_drivers_text(monkeypatch, error: type[Exception]):
    """The log of a worker has the whole traceback of what ends it, with causes."""

    def fails(*_: object) -> None:
        raise error(f"https://host/a.txt?sig={SECRET}")

    monkeypatch.setattr(remote_files, "RETRY_S", ())
    monkeypatch.setattr("fsspec.core.url_to_fs", fails)
    for act in (
        lambda: remote_files.attempt(fails, "the file", AbortToken(), print),
        lambda: remote_files.open_store("https://host/a.txt"),
    ):
        with pytest.raises(DataError) as caught:
            act()
        assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_each_optional_package_is_an_extra_of_the_project():
    """What a message tells a user to install can be named when the package itself is installed."""
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    offered = {package for name, packages in extras.items() if name != "test" for package in packages}
    wanted = {package for packages in remote_files.PACKAGES.values() for package in packages.split()}
    assert wanted | {package for package, _ in TRACKERS.values()} | {"lm_eval"} <= offered
