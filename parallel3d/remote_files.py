"""Files in remote stores (s3://, gs://, hf://, https://, ...), by fsspec: opening a store, attempts, what errors say.

Credentials come from each driver's own environment. What a message or a file of the run says of an address has neither
its user nor its query. Errors are raised without the driver's as their cause: the log of a worker shows a whole
traceback, and the driver's text may quote an address with a signature, a key or a token.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import ssl
from collections.abc import Callable
from typing import Any

from parallel3d.errors import DataError, Parallel3dError, UserError
from parallel3d.parallel.abort import AbortToken
from parallel3d.remote_address import redacted

PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "hf": "huggingface_hub",
    "http": "aiohttp requests",
    "https": "aiohttp requests",
    "abfs": "adlfs",
    "az": "adlfs",
}
"""The packages that pip installs for a protocol. fsspec itself comes with torch."""
RETRY_S = (1.0, 5.0, 20.0)
"""Waits before each further attempt."""
CHUNK_BYTES = 2**22

Log = Callable[[str], None]


class TransferError(ConnectionError):
    """A file has not arrived as it is; the text is ours."""


_CODE = re.compile("[A-Za-z]{3,40}|[0-9]{3}")
"""What stores call their errors: NoSuchBucket, 503."""


def open_store(source: str, *, kind: type[UserError] = DataError) -> tuple[Any, str]:
    """The file system of a source, and its path there. Raises `kind` if its driver is missing, or can't be set up."""
    import fsspec

    name, protocol = redacted(source), source.partition("://")[0]
    try:
        return fsspec.core.url_to_fs(source)
    except ImportError:
        package = PACKAGES.get(protocol, f"the driver of {protocol}://")
        raise kind(f"{name}: {protocol}:// needs a driver: pip install {package}") from None
    except ValueError:
        known = ", ".join(f"{each}://" for each in PACKAGES)
        raise kind(f"{name}: {protocol}:// can't be opened; known are {known} and others of fsspec") from None
    except Exception as error:  # each driver has its own
        raise kind(f"{name}: the driver of {protocol}:// can't be set up: {problem_of(error)}") from None


def attempt(
    act: Callable[[], Any], name: str, token: AbortToken, log: Log, *, kind: type[UserError] = DataError
) -> Any:
    """Calls `act` again after what may pass; `kind` for what does not, and after the last attempt."""
    for number in range(len(RETRY_S) + 1):
        try:
            return act()
        except FileNotFoundError:
            raise kind(f"{name}: not found there (404): check the address") from None
        except PermissionError:
            raise kind(f"{name}: access denied: check the credentials in the driver's environment") from None
        except Exception as error:  # each driver has its own
            if isinstance(error, Parallel3dError):
                raise
            problem = problem_of(error)
            if getattr(error, "status", None) in (401, 403):
                raise kind(f"{name}: access denied ({problem}): check the credentials") from None
            if number == len(RETRY_S):
                raise kind(f"{name}: {problem}, after {len(RETRY_S)} retries") from None
            log(f"{name}: {problem}; retry {number + 1} of {len(RETRY_S)} in {RETRY_S[number]:g} s")
            token.sleep(RETRY_S[number])
    raise AssertionError("the last attempt returns or raises")


def problem_of(error: BaseException) -> str:
    """The kinds of an error and of its cause, with the store's status or code, or the system's message.

    Nothing of a driver's own text: it may quote an address with a signature, a key or a token.
    """
    cause = error.__cause__ or error.__context__
    return _kind_of(error) + (f", by {_kind_of(cause)}" if isinstance(cause, Exception) else "")


def _kind_of(error: BaseException) -> str:
    if isinstance(error, TransferError):
        return f"ConnectionError ({error})"
    kind = type(error).__name__
    answer = getattr(error, "response", None)  # of botocore: what the store has answered
    code = answer["Error"].get("Code") if isinstance(answer, dict) and isinstance(answer.get("Error"), dict) else None
    status = getattr(error, "status", None) or getattr(error, "code", None) or code
    if isinstance(status, int) or (isinstance(status, str) and _CODE.fullmatch(status)):
        return f"{kind} {status}"
    words = _system_words(error)
    return f"{kind} ({words})" if words else kind


def _system_words(error: BaseException) -> str | None:
    """The system's message for the number of an error; None without such a number. Those of TLS and of hosts that have
    no address are others than the system's."""
    inner, number = getattr(error, "os_error", error), getattr(error, "errno", None)  # the first: of aiohttp
    if isinstance(inner, ssl.SSLCertVerificationError):
        return "the certificate of the host can't be verified"
    if isinstance(inner, ssl.SSLError):
        return "no agreement on TLS with the host"
    if isinstance(inner, socket.gaierror):
        return "the name of the host can't be resolved"
    return os.strerror(number) if isinstance(number, int) and number in errno.errorcode else None
