"""Serves the page of a run to this machine alone: it is rendered again when the run's files have changed.

/          the page, with a script that asks for /version and takes over a new page, at the same place
/version   a word that changes with the files
"""

from __future__ import annotations

import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self

from parallel3d.errors import UserError
from parallel3d.evaluation.saved_results import EVALUATIONS
from parallel3d.monitor.run_folder import CONFIG, ENVIRONMENT, METRICS, SUMMARY
from parallel3d.monitor.upload_history import UPLOADS
from parallel3d.report_page.html_page import render_page, render_waiting_page
from parallel3d.report_page.page_data import make_page
from parallel3d.report_page.page_file import read_run

LOOPBACK = "127.0.0.1"
HOSTS = (LOOPBACK, "localhost")
REQUEST_TIMEOUT_S = 10.0
POLL_S = 0.1
"""Between two looks whether to end."""


class RenderedRun:
    """The page of a run; one thread at a time renders it."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._lock = threading.Lock()
        self._version, self._text = "", ""

    def version(self) -> str:
        """Sizes and times of the files."""
        found = []
        results = self._folder / EVALUATIONS
        files = (self._folder / name for name in (METRICS, SUMMARY, CONFIG, ENVIRONMENT, UPLOADS))
        for path in (*files, results, *sorted(results.glob("*"))):  # a new result changes its folder
            try:
                status = path.stat()
                found.append(f"{status.st_ino:x}.{status.st_size:x}.{status.st_mtime_ns:x}")
            except OSError:
                found.append("none")
        return "-".join(found)

    def text(self) -> str:
        with self._lock:
            version = self.version()
            if version != self._version:
                self._text = self._render(version)
                self._version = version
            return self._text

    def _render(self, version: str) -> str:
        try:
            page = make_page([read_run(self._folder)])
        except UserError as error:  # no step yet
            return render_waiting_page(str(error), version=version)
        return render_page(page, now_s=time.time(), version=version)


class PageServer:
    """Serves from `with` on, in threads of its own. Raises UserError where the port is taken."""

    def __init__(self, folder: Path, *, port: int):
        try:
            self._server = ThreadingHTTPServer((LOOPBACK, port), make_handler(RenderedRun(folder)))
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else "ports are 0 to 65535"
            raise UserError(f"--serve {port}: can't listen there ({reason}); give another port, or none") from None
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_S,), name="page-server", daemon=True
        )

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self._server.server_address[1]}/"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()


def make_handler(run: RenderedRun) -> type[BaseHTTPRequestHandler]:
    """The class that answers requests with the page of `run`."""

    class PageRequest(BaseHTTPRequestHandler):
        timeout = REQUEST_TIMEOUT_S
        server_version = "parallel3d"
        sys_version = ""

        def do_GET(self) -> None:
            host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
            if host not in HOSTS:  # a page of another site, whose name leads here
                self.answer(HTTPStatus.FORBIDDEN, "text/plain", f"only for {' and '.join(HOSTS)}")
            elif self.path == "/":
                self.answer(HTTPStatus.OK, "text/html", run.text())
            elif self.path == "/version":
                self.answer(HTTPStatus.OK, "text/plain", run.version())
            else:
                self.answer(HTTPStatus.NOT_FOUND, "text/plain", "only / and /version")

        def answer(self, status: HTTPStatus, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            return  # the terminal belongs to the figures

    return PageRequest
