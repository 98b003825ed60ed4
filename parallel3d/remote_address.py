"""Addresses of remote files, and what of one may be shown and kept: neither its user, perhaps with a password, nor its
query, perhaps a signature.

A query that a source needs stands in an environment variable, and the address has its name: https://host/t.txt?${NAME}.
It is read where the file is opened, so that what a run writes, shows and compares has the name alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

PLAIN_PARAMETERS = ("alt", "dl", "download", "file", "raw", "ref", "rev", "revision", "version", "versionId")
"""Parameters of queries that choose a form or a version of a file: they hold nothing secret."""
QUERY_FIX = (
    "Put what follows the ? into an environment variable on every host, such as SIGNATURE, and write ?${SIGNATURE} in"
    " its place (a shell needs single quotes around it); or download the file, or give the driver credentials in its"
    " environment"
)

_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)\}")
_PART = re.compile(rf"(?:[\w.~-]+=)?{_VARIABLE.pattern}|(?:{'|'.join(PLAIN_PARAMETERS)})=[\w./~-]*")
_QUERY = re.compile(r"[?#](.*)", re.DOTALL)
_QUERY_BESIDE_GLOBS = re.compile(r"\?([\w.~%-]+=.*|\$\{.*)", re.DOTALL)
_USER = re.compile(r"://[^\s/?#'\"]*@")
_ADDRESS = re.compile(r"(?<!\w)\w+://[^\s'\"]*")
"""Looked for only where a word begins: within a long one each place would be tried to its end."""


def is_remote(source: str) -> bool:
    return "://" in source


def redacted(source: str) -> str:
    """The source without credentials: neither a user and password nor a query."""
    return _USER.sub("://", re.split("[?#]", source)[0])


def has_user(address: str) -> bool:
    return _USER.search(address) is not None


def without_secrets(text: str) -> str:
    """A text with the users of its addresses left out, and their queries unless these may be kept."""

    def shown(address: re.Match[str]) -> str:
        without_user = _USER.sub("://...@", address[0])
        return without_user if broken_query_rule(address[0]) is None else without_user[: _start(without_user)] + "?..."

    return _ADDRESS.sub(shown, text)


def broken_query_rule(address: str) -> str | None:
    """The rule that an address breaks whose query would be kept as it is; None without a query, or one without
    secrets."""
    query = _query_of(address)
    if query is None:
        return None
    if not query:
        return "must not end with a ?, which is all that a shell leaves of ?${NAME} in double quotes"
    if all(_PART.fullmatch(part) for part in query.split("&")):
        return None
    return "must not have a query: it would be kept in config.json, signature and all"


def variables_of(address: str) -> list[str]:
    """The environment variables that an address names in its query."""
    return _VARIABLE.findall(_query_of(address) or "")


def with_variables(address: str, environment: Mapping[str, str]) -> str:
    """The address to open: the names of environment variables in its query are replaced by their values, whose own
    leading ? is left out. Each must be in `environment`."""
    if not (query := _query_of(address)):
        return address
    filled = _VARIABLE.sub(lambda name: environment[name[1]].strip().removeprefix("?"), query)
    return address.removesuffix(query) + filled


def _query_of(address: str) -> str | None:
    """What follows the ? (of https:// also the #). Elsewhere a ? may be a part of a glob: a query has a name and = ."""
    found = _found(address)
    return found[1] if found else None


def _start(address: str) -> int:
    found = _found(address)
    return found.start() if found else len(address)


def _found(address: str) -> re.Match[str] | None:
    form = _QUERY if re.search(r"\bhttps?://", address) else _QUERY_BESIDE_GLOBS
    return form.search(address)
