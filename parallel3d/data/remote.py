"""Remote sources (s3://, gs://, hf://, https://, ...), by fsspec: copied once into a folder of the cache.

<cache_directory>/remote/<hash of the source>/    the files under their names below the source, and
                                                  fetched.json: the size and version of each

A copy that is complete is used without asking the network again: a restart doesn't depend on it. One process of each
host copies, the others wait. Credentials come from each driver's own environment, the query of an address from the
environment variable that it names. The hash is of the name, so that the copy is found again with a new signature. What
a message or a file here says of a source has neither its user nor its query.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from parallel3d.data.cache import build_once
from parallel3d.errors import DataError, shorten
from parallel3d.parallel.abort import AbortToken
from parallel3d.remote_address import QUERY_FIX, broken_query_rule, is_remote, redacted, variables_of, with_variables
from parallel3d.remote_files import CHUNK_BYTES, Log, TransferError, attempt, open_store

MANIFEST = "fetched.json"
VERSION_FIELDS = ("ETag", "etag", "md5", "checksum", "last_modified", "LastModified", "mtime", "created")


def local_path(source: str, cache_directory: Path) -> str:
    """Where the copy of a source is, once `fetch` has made it; a local source is where it is."""
    if not is_remote(source):
        return source
    return str(_folder_of(source, cache_directory) / "files")


def fetch(
    sources: Sequence[str], cache_directory: Path, token: AbortToken, log: Log, suffixes: tuple[str, ...] = ()
) -> None:
    """Copies the remote ones of `sources` unless that has been done; with `suffixes` of a folder itself only the files
    whose names end so. Raises DataError with the source and the reason, also for a query that is not in an environment
    variable; GenerationEnded once the token is aborted."""
    for source in filter(is_remote, sources):
        if problem := broken_query_rule(source):
            raise DataError(f"the address {redacted(source)} {problem}. {QUERY_FIX}")
        copy = partial(_copy, source, suffixes, token, log)
        build_once(_folder_of(source, cache_directory), copy, token, log)


def _folder_of(source: str, cache_directory: Path) -> Path:
    return cache_directory.expanduser() / "remote" / hashlib.sha256(source.encode()).hexdigest()[:16]


def _copy(source: str, suffixes: tuple[str, ...], token: AbortToken, log: Log, folder: Path) -> None:
    """Fills `folder` with the files of a source."""
    name = redacted(source)
    for variable in variables_of(source):
        if not os.environ.get(variable):
            raise DataError(f"{name}: its query is in the environment variable {variable}: set it on this host")
    fs, path = open_store(with_variables(source, os.environ))
    found, root = attempt(partial(_files, fs, path), name, token, log)
    if suffixes:
        found = {each: size for each, size in found.items() if _is_wanted(name_of(each, root), suffixes)}
    if not found:
        raise DataError(f"{name}: no such file or folder, or an empty one")
    total = sum(size or 0 for size in found.values())
    log(f"fetching {name}: {len(found):,} files, {total / 1e6:,.1f} MB, into the cache")
    records = []
    for remote in sorted(found):
        target = folder / "files" / name_of(remote, root)
        if not target.resolve().is_relative_to(folder.resolve()):
            raise DataError(f"{name}: the name {shorten(name_of(remote, root))!r} leads out of its folder")
        target.parent.mkdir(parents=True, exist_ok=True)
        label = f"{name}, file {target.name}"
        version = attempt(partial(_copy_file, fs, remote, target, token), label, token, log)
        records.append({"file": str(target.relative_to(folder)), "size": target.stat().st_size, "version": version})
    (folder / MANIFEST).write_text(json.dumps({"source": name, "files": records}, indent=1))


def _files(fs: Any, path: str) -> tuple[dict[str, int | None], str]:
    """The size of each file of a path, glob or folder, and the folder that their names are relative to; "" for one."""
    fs.invalidate_cache()
    if any(mark in path for mark in "*[") and not fs.protocol[0].startswith("http"):
        paths = [each for each in fs.glob(path) if fs.isfile(each)]
        root = str(PurePosixPath(*[part for part in PurePosixPath(path).parts if not set(part) & set("*?[")]))
    elif fs.isdir(path) and not fs.isfile(path):
        paths, root = fs.find(path), path
    else:
        paths, root = [path], ""
    infos = {each: fs.info(each) for each in paths}
    if any(_is_page(each, info) for each, info in infos.items()):
        raise DataError(
            f"{redacted(path)}: a web page, such as the list of a folder, not a file of data: a server has no list of"
            " files that could be relied on, so give the address of each file in data.sources"
        )
    return {each: info.get("size") for each, info in infos.items()}, root


def _is_wanted(name: str, suffixes: tuple[str, ...]) -> bool:
    return "/" not in name and name.endswith(suffixes)


def _is_page(remote: str, info: Mapping[str, Any]) -> bool:
    """Whether a web server answers with a page, which is not what was asked for unless the name says so."""
    if not remote.startswith(("http://", "https://")):
        return False
    name = urlsplit(remote).path
    is_html = str(info.get("mimetype", "")).partition(";")[0].strip() == "text/html"
    return name.endswith("/") or not name or (is_html and not name.endswith((".html", ".htm")))


def name_of(remote: str, root: str) -> str:
    """The name of a file's copy: its path below `root`; without the query of an address, which may be a signature."""
    path = urlsplit(remote).path if remote.startswith(("http://", "https://")) else remote
    return str(PurePosixPath(path).relative_to(root)) if root else PurePosixPath(path).name


def _copy_file(fs: Any, remote: str, target: Path, token: AbortToken) -> str:
    """Copies one file and returns its version; OSError if it is not whole, or changed meanwhile."""
    fs.invalidate_cache()
    before, num_bytes = fs.info(remote), 0
    with fs.open(remote, "rb") as file, target.open("wb") as copy:
        while chunk := file.read(CHUNK_BYTES):
            token.check()
            copy.write(chunk)
            num_bytes += len(chunk)
    if before.get("size") is not None and num_bytes != before["size"]:
        raise TransferError(f"{num_bytes:,} of {before['size']:,} bytes arrived")
    fs.invalidate_cache()
    if _version(fs.info(remote)) != _version(before):
        raise TransferError("the file changed while it was copied")
    return _version(before)


def _version(info: Any) -> str:
    """The version of a file by its store; "" if that names none."""
    return "; ".join(f"{name} {info[name]}" for name in VERSION_FIELDS if info.get(name) is not None)
