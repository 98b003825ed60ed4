"""Files in remote stores (s3://, gs://, hf://, https://, ...), by fsspec: opening a store, attempts, what errors say.

Credentials come from each driver's own environment. What a message or a file of the run says of an address has neither
its user nor its query.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from parallel3d.errors import DataError, UserError, shorten
from parallel3d.parallel.abort import AbortToken

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

_WORD = re.compile(r"[\w+/=-]{16,}")


def is_remote(source: str) -> bool:
    return "://" in source


def redacted(source: str) -> str:
    """The source without credentials: neither a user and password nor a query."""
    parts = urlsplit(source)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def open_store(source: str, *, kind: type[UserError] = DataError) -> tuple[Any, str]:
    """The file system of a source, and its path there. Raises `kind` if its driver is missing."""
    import fsspec

    name, protocol = redacted(source), source.partition("://")[0]
    try:
        return fsspec.core.url_to_fs(source)
    except ImportError as error:
        package = PACKAGES.get(protocol, f"the driver of {protocol}://")
        raise kind(f"{name}: {protocol}:// needs a driver: pip install {package}") from error
    except ValueError as error:
        known = ", ".join(f"{each}://" for each in PACKAGES)
        raise kind(f"{name}: {protocol}:// can't be opened; known are {known} and others of fsspec") from error


def attempt(
    act: Callable[[], Any], name: str, token: AbortToken, log: Log, *, kind: type[UserError] = DataError
) -> Any:
    """Calls `act` again after what may pass; `kind` for what does not, and after the last attempt."""
    for number in range(len(RETRY_S) + 1):
        try:
            return act()
        except FileNotFoundError as error:
            raise kind(f"{name}: not found there (404): check the address") from error
        except PermissionError as error:
            raise kind(f"{name}: access denied: check the credentials in the driver's environment") from error
        except Exception as error:  # each driver has its own
            if type(error).__module__.startswith("parallel3d"):
                raise
            problem = problem_of(error)
            if getattr(error, "status", None) in (401, 403):
                raise kind(f"{name}: access denied ({problem}): check the credentials") from error
            if number == len(RETRY_S):
                raise kind(f"{name}: {problem}, after {len(RETRY_S)} retries") from error
            log(f"{name}: {problem}; retry {number + 1} of {len(RETRY_S)} in {RETRY_S[number]:g} s")
            token.sleep(RETRY_S[number])
    raise AssertionError("the last attempt returns or raises")


def problem_of(error: BaseException) -> str:
    """The kind of an error, and its text unless that quotes an address, which may hold credentials. Words that look
    like a key are left out of it."""
    text, kind = " ".join(str(error).split()), type(error).__name__
    if (status := getattr(error, "status", None)) is not None:
        return f"{kind} {status}"
    text = _WORD.sub(lambda word: "***" if _is_like_a_key(word[0]) else word[0], text)
    return kind + (f" ({shorten(text)})" if text and "://" not in text and "@" not in text else "")


def _is_like_a_key(word: str) -> bool:
    """Whether it has digits and capital letters, as access keys and tokens do, and paths and numbers rarely."""
    return any(each.isdigit() for each in word) and any(each.isupper() for each in word)
