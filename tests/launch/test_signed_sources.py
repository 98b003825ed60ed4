"""A run on a signed address: nothing that it writes or prints holds the signature."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from parallel3d.commands import evaluate
from tests.support.launch_runs import finish, metrics, start

pytest.importorskip("aiohttp")
pytestmark = pytest.mark.slow
SECRETS = ("SECRET5IGNATURE", "ANOTHER5IGNATURE")


class SignedFiles(BaseHTTPRequestHandler):
    """Answers with a text to who has the first signature; of other paths with 404."""

    def __init__(self, content: bytes, *arguments: object) -> None:
        self.content = content
        super().__init__(*arguments)

    def do_HEAD(self) -> None:
        path, _, query = self.path.partition("?")
        has_access = query == f"X-Amz-Date=1&X-Amz-Signature={SECRETS[0]}"
        self.send_response((200 if path == "/t.txt" else 404) if has_access else 403)
        self.send_header("Content-Length", str(len(self.content) if path == "/t.txt" and has_access else 0))
        self.send_header("Content-Type", "text/plain")
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        if self.path.startswith("/t.txt?") and SECRETS[0] in self.path:
            self.wfile.write(self.content)

    def log_message(self, *arguments: object) -> None:
        """Nothing on the standard error."""


@pytest.fixture
def address(text: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SignedFiles, text.read_bytes()))
    thread = threading.Thread(target=partial(server.serve_forever, 0.02), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join(100)


def assert_no_secret(folder: Path, *printed: str) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    for secret in SECRETS:
        assert not [path for path in files if secret.encode() in path.read_bytes() or secret in path.name]
        assert not any(secret in text for text in printed)


def test_no_file_of_a_run_has_a_signature(config_file, tmp_path, address, monkeypatch, capsys):
    """A run, its page, its checkpoints here and there, a resumed run with another signature, an evaluation."""
    monkeypatch.setenv("SIGNATURE", f"X-Amz-Date=1&X-Amz-Signature={SECRETS[0]}")
    source, cache, run = f"{address}/t.txt?${{SIGNATURE}}", f"data.cache_directory={tmp_path}/cache", tmp_path / "run"
    command = ["--config", config_file, f'data.sources=["{source}"]', cache, "run.resume=auto", "monitor.charts=true"]
    command += [f"checkpoint.upload=file://{tmp_path}/store", "lr_schedule.decay_steps=12"]
    code, out, err = finish(start(*command, "run.num_steps=6"))
    assert code == 0, out + err
    names = {path.name for path in tmp_path.rglob("*") if path.is_file() and source in path.read_text(errors="replace")}
    assert {"config.json", "environment.json", "index.json"} <= names
    assert (run / "report.html").is_file() and [*tmp_path.glob("store/step-00000006-*/index.json")]
    monkeypatch.setenv("SIGNATURE", f"X-Amz-Date=1&X-Amz-Signature={SECRETS[1]}")
    code, again, errors = finish(start(*command))
    assert code == 0 and metrics(run)[-1]["step"] == 12, again + errors
    monkeypatch.delenv("SIGNATURE")
    monkeypatch.chdir(tmp_path)  # where the results of an evaluation go
    assert evaluate.main([str(run)]) == 0
    assert_no_secret(tmp_path, out, err, again, errors, *capsys.readouterr())


@pytest.mark.full
@pytest.mark.parametrize(("file", "signature", "message"), [("t.txt", 1, "access denied"), ("no.txt", 0, "not found")])
def test_no_log_of_a_failed_start_has_a_signature(
    config_file, tmp_path, address, monkeypatch, file, signature, message
):
    monkeypatch.setenv("SIGNATURE", f"X-Amz-Date=1&X-Amz-Signature={SECRETS[signature]}")
    sources = f'data.sources=["{address}/{file}?${{SIGNATURE}}"]'
    code, out, err = finish(start("--config", config_file, sources, f"data.cache_directory={tmp_path}/cache"))
    assert code == 2 and f"{address}/{file}: {message}" in err.replace(f", file {file}", ""), out + err
    assert_no_secret(tmp_path, out, err)


@pytest.mark.full
def test_a_signature_in_the_address_leaves_no_run(config_file, tmp_path, address):
    sources = f'data.sources=["{address}/t.txt?X-Amz-Date=1&X-Amz-Signature={SECRETS[0]}"]'
    code, out, err = finish(start("--config", config_file, sources))
    assert code == 2 and "data.sources.0" in err and "environment variable" in err and not (tmp_path / "run").exists()
    assert_no_secret(tmp_path, out, err)
