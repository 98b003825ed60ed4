"""Remote sources from an HTTP server of this machine: what it refuses, cuts off and changes, and what messages say."""

from __future__ import annotations

import hashlib
import threading
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from parallel3d.data.remote import MANIFEST, fetch, local_path
from parallel3d.data.sources import find_files
from parallel3d.errors import DataError
from parallel3d.parallel.abort import AbortToken

pytest.importorskip("aiohttp")

LINES = b"one line of text\n"
SECRETS = ("hidden-user", "hidden-word", "hidden-key")
RETRIES = ["retry 1 of 3 in 1 s", "retry 2 of 3 in 5 s", "retry 3 of 3 in 20 s"]


class Store:
    """What the server has, and how it answers the next requests for bytes."""

    def __init__(self, *, has_ranges: bool) -> None:
        self.files = {"/a/text.txt": LINES * 40}
        self.has_ranges = has_ranges
        self.answers: list[int | str] = []
        """A status; "well"; "cut": half of the bytes, then the connection ends; "change": well, but other bytes follow.
        The first is for the question whether an address is a folder."""
        self.num_asked = 0
        self.queries: set[str] = set()


class Handler(BaseHTTPRequestHandler):
    def __init__(self, store: Store, *arguments: object) -> None:
        self.store = store
        super().__init__(*arguments)

    @property
    def content(self) -> bytes | None:
        return self.store.files.get(self.path.partition("?")[0])

    def do_HEAD(self) -> None:
        self.answer(404 if self.content is None else 200, self.content or b"", share=0)

    def do_GET(self) -> None:
        self.store.num_asked += 1
        self.store.queries.add(self.path.partition("?")[2])
        how = self.store.answers.pop(0) if self.store.answers else "well"
        if self.content is None or isinstance(how, int):
            self.answer(how if isinstance(how, int) else 404, b"")
            return
        part, status = self.content, 200
        if self.store.has_ranges and "Range" in self.headers:
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            part, status = self.content[first : last + 1], 206
        self.answer(status, part, share=0.5 if how == "cut" else 1, changes=how == "change")

    def answer(self, status: int, body: bytes, *, share: float = 1, changes: bool = False) -> None:
        """`changes`: the files are others before the client has all bytes, so that it can't ask again too early."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "text/html; charset=utf-8" if "pages" in self.path else "text/plain")
        self.send_header("ETag", hashlib.sha256(self.content or b"").hexdigest())
        self.send_header("Accept-Ranges", "bytes" if self.store.has_ranges else "none")
        self.end_headers()
        if changes:
            self.store.files = {path: content[1:] for path, content in self.store.files.items()}
        self.wfile.write(body[: int(len(body) * share)])

    def log_message(self, *arguments: object) -> None:
        """Nothing on the standard error."""


@pytest.fixture(params=[True, False], ids=["ranges", "whole"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(AbortToken, "sleep", lambda token, seconds: None)
    made = Store(has_ranges=request.param)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, made))
    made.port = server.server_address[1]
    thread = threading.Thread(target=partial(server.serve_forever, 0.02), daemon=True)
    thread.start()
    yield made
    server.shutdown()
    server.server_close()
    thread.join(100)


@pytest.fixture
def copy(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[bytes, list[str]]]:
    """Fetches a path of the server, with secrets in its address: the copy's bytes and what was logged."""
    monkeypatch.setenv("SIGNATURE", "?signature=hidden-key\n")

    def copied(path: str = "/a/text.txt") -> tuple[bytes, list[str]]:
        source = f"http://hidden-user:hidden-word@127.0.0.1:{store.port}{path}?version=1&${{SIGNATURE}}"
        logged: list[str] = []
        try:
            fetch([source], tmp_path, AbortToken(), logged.append)
            (file,) = find_files([local_path(source, tmp_path)])
        except DataError as error:
            logged.append("".join(traceback.format_exception(error)))
            raise
        finally:
            notes = [*logged, *(page.read_text() for page in tmp_path.rglob(MANIFEST)), *map(str, tmp_path.rglob("*"))]
            assert not any(secret in note for secret in SECRETS for note in notes)
        assert file.path.name == "text.txt"
        return file.path.read_bytes(), logged

    return copied


def test_a_file_is_copied_once(store: Store, copy: Callable[..., tuple[bytes, list[str]]]) -> None:
    content, logged = copy()
    asked = store.num_asked
    assert content == LINES * 40 and len(logged) == 1 and "1 files, 0.0 MB, into the cache" in logged[0]
    assert copy() == (content, []) and store.num_asked == asked
    assert store.queries == {"version=1&signature=hidden-key"}


def test_a_new_signature_finds_the_copy(
    store: Store, copy: Callable[..., tuple[bytes, list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, asked = copy()[0], store.num_asked
    monkeypatch.setenv("SIGNATURE", "signature=another")
    assert copy() == (content, []) and store.num_asked == asked
    monkeypatch.delenv("SIGNATURE")
    with pytest.raises(DataError, match=r"^http://127.*/a/text.txt: .* variable SIGNATURE: set it on this host$"):
        fetch([f"http://127.0.0.1:{store.port}/a/text.txt?${{SIGNATURE}}"], tmp_path, AbortToken(), print)


def test_a_signature_in_the_address_is_refused(store: Store, tmp_path: Path) -> None:
    """Also where no rule of the configuration has been asked, as by `parallel3d evaluate RUN --set`."""
    for secret in ("signature=hidden-key", "version=1;signature=hidden-key"):
        with pytest.raises(DataError, match=r"text.txt must not have a query.*environment variable") as caught:
            fetch([f"http://127.0.0.1:{store.port}/a/text.txt?{secret}"], tmp_path, AbortToken(), print)
        assert "hidden" not in str(caught.value) and not store.num_asked


def test_what_may_pass_is_tried_again(store: Store, copy: Callable[..., tuple[bytes, list[str]]]) -> None:
    store.answers = ["well", 503, "cut", 500]
    content, logged = copy()
    assert content == LINES * 40
    assert [line.partition("; ")[2] for line in logged[1:]] == RETRIES
    assert "ClientResponseError 503" in logged[1] and "ClientPayloadError" in logged[2]


def test_an_unwilling_server_before_the_first_byte(store: Store, copy: Callable[..., tuple[bytes, list[str]]]) -> None:
    store.answers = [503, 503]
    content, logged = copy()
    assert content == LINES * 40 and [line.partition("; ")[2] for line in logged[:2]] == RETRIES[:2]


@pytest.mark.parametrize("path", ["/pages/a/", "/pages/a", "/plain/"])
def test_a_folder_is_refused(store: Store, copy: Callable[..., tuple[bytes, list[str]]], path: str) -> None:
    """The server answers with an HTML page that lists it, which is refused by its type or its address."""
    store.files = {path: b'<a href="text.txt">text.txt</a>', "/pages/a/text.txt": LINES}
    with pytest.raises(DataError, match=r"http://127.0.0.1:\d+/\w+/.*: a web page, such as the list of a folder.*each"):
        copy(path)


def test_a_file_that_changes_meanwhile(store: Store, copy: Callable[..., tuple[bytes, list[str]]]) -> None:
    store.answers = ["well", "change"]
    content, logged = copy()
    assert content == (LINES * 40)[1:]
    assert "the file changed while it was copied); retry 1 of 3" in logged[1] and len(logged) == 2


@pytest.mark.parametrize(
    "answers, path, expected",
    [
        (["well", "cut", "cut", "cut", "cut"], "/a/text.txt", r"text.txt: ClientPayloadError.*after 3 retries$"),
        ([503] * 4, "/a/text.txt", r"text.txt: ClientResponseError 503, after 3 retries$"),
        ([], "/a/none.txt", r"none.txt: not found there \(404\): check the address$"),
        (["well", 403], "/a/text.txt", r"text.txt: access denied \(ClientResponseError 403\): check the credentials$"),
        ([401], "/a/text.txt", r"text.txt: access denied \(ClientResponseError 401\): check the credentials$"),
    ],
)
def test_what_stays_wrong_ends_the_start(
    store: Store,
    copy: Callable[..., tuple[bytes, list[str]]],
    answers: list[int | str],
    path: str,
    expected: str,
) -> None:
    store.answers = [*answers]
    with pytest.raises(DataError, match=f"^http://127.0.0.1:{store.port}/a/.*{expected}"):
        copy(path)
    assert not store.answers
    assert copy()[0] == LINES * 40


def test_nobody_answers(store: Store, copy: Callable[..., tuple[bytes, list[str]]]) -> None:
    store.port = 9  # nothing listens at the discard port here
    with pytest.raises(DataError, match="ClientConnectorError.*after 3 retries"):
        copy()
