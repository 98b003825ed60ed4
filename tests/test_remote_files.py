"""What is said of errors of drivers: enough to act on, and nothing of their text, which may quote credentials."""

from __future__ import annotations

import errno
import socket
import ssl
import traceback

import pytest

from parallel3d import remote_files
from parallel3d.errors import DataError
from parallel3d.parallel.abort import AbortToken

SECRET = "AKIA5SECRET0KEY99XYZ"


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
