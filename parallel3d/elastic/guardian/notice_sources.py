"""Where it stands that a host will be taken away: a file, a command's exit code, a cloud's metadata server.

Each may block or fail, so all are asked in a process of their own (host_notice.py). What the clouds answer:

    aws    spot/instance-action   404, or {"action": "terminate", "time": "2026-11-23T08:22:00Z"}; needs a token
    gcp    instance/preempted     FALSE or TRUE; 30 s are left
           maintenance-event      NONE, or TERMINATE_ON_HOST_MAINTENANCE for machines that can't be moved
    azure  scheduledevents        {"Events": [{"EventType": "Preempt", "Resources": ["name"], "NotBefore": ...}]} of all
                                  machines of a scale set; instance/compute/name says which of them this one is
"""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path

from parallel3d.config.schema import NoticeConfig

ASK_S = 2.0
"""Longest wait for one answer of a metadata server."""
COMMAND_S = 30.0
"""Longest run of a command."""
MAX_TEXT = 200
DEFAULT_URLS = {
    "aws": "http://169.254.169.254",
    "gcp": "http://metadata.google.internal",
    "azure": "http://169.254.169.254",
}
USUAL_SECONDS = {"aws": 120.0}
"""From a notice that names no time; 30 elsewhere."""
LEAST_SECONDS = 30.0
MOST_SECONDS = 86_400.0
AZURE_EVENTS = ("Preempt", "Terminate", "Redeploy", "Reboot")
"""Those that a process does not outlive."""


@dataclass(frozen=True, kw_only=True)
class Notice:
    """This host will be taken away, in about `seconds`."""

    text: str
    seconds: float


Source = Callable[[], Notice | None]
"""Returns the notice, if there is one. Raises OSError or ValueError if that can't be found out."""


def build_sources(config: NoticeConfig) -> dict[str, Source]:
    """Returns the configured sources that must be asked again and again, by their names."""
    usual_s = config.deadline_s or LEAST_SECONDS
    sources: dict[str, Source] = {}
    if config.file is not None:
        sources[f"the file {config.file}"] = partial(look_for_file, Path(config.file), usual_s)
    if config.command is not None:
        sources[f"the command {config.command!r}"] = partial(run_command, config.command, usual_s)
    if config.cloud is not None:
        url = (config.url or DEFAULT_URLS[config.cloud]).rstrip("/")
        ask = partial(CLOUDS[config.cloud], url)
        sources[f"{config.cloud}'s metadata at {url}"] = partial(ask_cloud, config, ask)
    return sources


def look_for_file(path: Path, seconds: float) -> Notice | None:
    return Notice(text=f"{path} exists", seconds=seconds) if path.exists() else None


def run_command(command: str, seconds: float) -> Notice | None:
    try:
        done = subprocess.run(
            command, shell=True, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_S
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"no end within {COMMAND_S:g} s") from None
    if done.returncode == 0:
        line = done.stdout.strip().partition("\n")[0]
        return Notice(text=line[:MAX_TEXT] or f"{command!r} succeeded", seconds=seconds)
    return None


@dataclass(frozen=True, kw_only=True)
class CloudEvent:
    """What will happen to this machine, and when, if the metadata server says so."""

    what: str
    at: datetime | None = None


def ask_cloud(config: NoticeConfig, ask: Callable[[], CloudEvent | None]) -> Notice | None:
    event = ask()
    if event is None:
        return None
    seconds = (event.at - datetime.now(UTC)).total_seconds() if event.at else 0.0
    if not 0.0 < seconds < MOST_SECONDS:  # no time is known, or the clocks differ
        seconds = USUAL_SECONDS.get(config.cloud or "", LEAST_SECONDS)
    return Notice(text=f"{config.cloud}: {event.what}"[:MAX_TEXT], seconds=config.deadline_s or seconds)


def ask_aws(url: str) -> CloudEvent | None:
    token = _request(f"{url}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, method="PUT")
    try:
        headers = {"X-aws-ec2-metadata-token": token}
        action = json.loads(_request(f"{url}/latest/meta-data/spot/instance-action", headers))
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise
    return CloudEvent(what=f"spot {action['action']}", at=datetime.fromisoformat(action["time"].replace("Z", "+00:00")))


def ask_gcp(url: str) -> CloudEvent | None:
    headers, instance = {"Metadata-Flavor": "Google"}, f"{url}/computeMetadata/v1/instance"
    if _request(f"{instance}/preempted", headers).strip() == "TRUE":
        return CloudEvent(what="preempted")
    event = _request(f"{instance}/maintenance-event", headers).strip()
    return CloudEvent(what=event) if event.startswith("TERMINATE") else None


def ask_azure(url: str) -> CloudEvent | None:
    headers = {"Metadata": "true"}
    events = json.loads(_request(f"{url}/metadata/scheduledevents?api-version=2020-07-01", headers))["Events"]
    found = [event for event in events if event["EventType"] in AZURE_EVENTS]
    if not found:
        return None
    path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    name = _request(url + path, headers).strip()
    for event in found:
        if name in event["Resources"]:
            at = parsedate_to_datetime(event["NotBefore"]) if event.get("NotBefore") else None
            return CloudEvent(what=event["EventType"], at=at)
    return None


CLOUDS: dict[str, Callable[[str], CloudEvent | None]] = {"aws": ask_aws, "gcp": ask_gcp, "azure": ask_azure}


def _request(url: str, headers: dict[str, str], *, method: str = "GET") -> str:
    """Returns an answer's text; a metadata server is never behind a proxy. Raises OSError."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, headers=headers, method=method), timeout=ASK_S) as answer:
        return str(answer.read().decode(errors="replace"))
