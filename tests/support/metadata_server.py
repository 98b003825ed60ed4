"""A cloud's metadata server on the loopback interface, which says what a test wants."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "a session's token"
MACHINE = "vm_7"


@dataclass
class MetadataServer:
    """Answers all three clouds' requests, and refuses those without the header that the real one wants."""

    url: str = ""
    event: str = ""
    """What will happen to this machine: nothing, or a word of the cloud's."""
    machine: str = MACHINE
    """The one of the scale set to which it happens."""
    seconds: float = 100.0
    """When; from now on."""
    refused: list[str] = field(default_factory=list)

    def answer(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        at = datetime.now(UTC) + timedelta(seconds=self.seconds)
        match method, path.partition("?")[0]:
            case "PUT", "/latest/api/token":
                is_asked_right = headers.get("x-aws-ec2-metadata-token-ttl-seconds", "").isdigit()
                return (200, TOKEN) if is_asked_right else self._refuse(path)
            case "GET", "/latest/meta-data/spot/instance-action":
                if headers.get("x-aws-ec2-metadata-token") != TOKEN:
                    return self._refuse(path)
                body = {"action": self.event, "time": at.strftime("%Y-%m-%dT%H:%M:%SZ")}
                return (200, json.dumps(body)) if self.event else (404, "not found")
            case "GET", "/computeMetadata/v1/instance/preempted":
                text = "TRUE" if self.event == "preempted" else "FALSE"
                return (200, text) if headers.get("metadata-flavor") == "Google" else self._refuse(path)
            case "GET", "/computeMetadata/v1/instance/maintenance-event":
                text = self.event if self.event.isupper() else "NONE"
                return (200, text) if headers.get("metadata-flavor") == "Google" else self._refuse(path)
            case "GET", "/metadata/scheduledevents":
                happens = {"EventType": self.event, "Resources": [self.machine], "NotBefore": format_datetime(at)}
                body = {"DocumentIncarnation": 1, "Events": [happens] if self.event else []}
                return (200, json.dumps(body)) if headers.get("metadata") == "true" else self._refuse(path)
            case "GET", "/metadata/instance/compute/name":
                return (200, MACHINE) if headers.get("metadata") == "true" else self._refuse(path)
        return self._refuse(path)

    def _refuse(self, path: str) -> tuple[int, str]:
        self.refused.append(path)
        return 401, "refused"


@contextmanager
def metadata_server() -> Iterator[MetadataServer]:
    state = MetadataServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            code, text = state.answer(self.command, self.path, headers)
            self.send_response(code)
            self.end_headers()
            self.wfile.write(text.encode())

        do_PUT = do_GET

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        state.url = f"http://127.0.0.1:{server.server_port}"
        yield state
        server.shutdown()
