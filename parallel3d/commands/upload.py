"""Copies checkpoints to a remote store: `parallel3d upload RUN_FOLDER s3://bucket/runs/name`.

Sends what is missing there, the newest first, each with its index last. `checkpoint.upload` starts it beside a run: it
then follows the run, and does each pass in a process that it watches. Exit codes: 0 all is there, 1 some is missing,
2 invalid input.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from parallel3d.checkpoint.directory import CheckpointDirectory
from parallel3d.checkpoint.remote_directory import RemoteDirectory
from parallel3d.checkpoint.store_process import EventPrinter, say
from parallel3d.checkpoint.upload import Keep, UploadPass, take_lock
from parallel3d.checkpoint.write_throttle import WriteThrottle
from parallel3d.child_process import end_with_parent
from parallel3d.commands.parsers import parse
from parallel3d.commands.upload_follower import UploadFollower
from parallel3d.errors import CheckpointError, UserError
from parallel3d.remote_address import redacted
from parallel3d.remote_files import problem_of

CHECKPOINTS = "checkpoints"
EXIT_INCOMPLETE = 1


def main(arguments: list[str]) -> int:
    options = parse("upload", arguments)
    events = EventPrinter() if options.events else None
    if events is not None:
        end_with_parent()

    def report(event: Mapping[str, Any]) -> None:
        if events is not None:
            events(event)
        elif text := describe(event):
            say(text)

    address = options.probe or options.target
    try:
        if options.follow:
            for number in (signal.SIGINT, signal.SIGTERM):  # of the run, which is to be sent after it
                signal.signal(number, signal.SIG_IGN)
            code = UploadFollower(options, options.checkpoints or options.folder / CHECKPOINTS).run()
            with suppress(OSError):  # the run's process is gone
                print("ended", flush=True)
            return code
        if options.probe:
            RemoteDirectory(address, check=lambda: None).probe()
            return 0
        if options.folder is None or address is None:
            raise UserError("give the folder of a run, or of its checkpoints, and the address to upload to")
        run_pass(options, report, events)
        return 0
    except UserError as error:
        report({"event": "failed", "text": str(error)})
        return EXIT_INCOMPLETE if isinstance(error, CheckpointError) else error.exit_code
    except Exception as error:  # whatever a driver raises; its traceback may quote credentials
        report({"event": "failed", "text": f"{redacted(address or '')}: {problem_of(error)}"})
        return EXIT_INCOMPLETE


def run_pass(options: Any, report: Any, events: EventPrinter | None) -> None:
    """Sends what is missing."""
    folder = options.folder
    directory = options.checkpoints or (folder / CHECKPOINTS if (folder / CHECKPOINTS).is_dir() else folder)
    throttle = WriteThrottle(options.share, clock=cpu_s)
    if events is not None:
        watch_input(throttle)
    if (lock := take_lock(directory)) is None and not options.locked:
        raise UserError(f"another process uploads from {directory}: its run, or another command")

    def check() -> None:
        throttle.throttle()
        if events is not None:
            events.beat()

    remote = RemoteDirectory(options.target, check=check, log=lambda text: report({"event": "retry", "text": text}))
    keep = Keep(last=options.keep_last, every=options.keep_every)
    try:
        UploadPass(CheckpointDirectory(directory), remote, keep, report).run(continued_from=options.continued_from)
    finally:
        if lock is not None:
            lock.close()


def cpu_s() -> float:
    """This process's CPU seconds: waiting for the network is not counted."""
    return sum(os.times()[:2])


def watch_input(throttle: WriteThrottle) -> None:
    """Ends the pauses once the standard input is closed: the run has ended."""

    def watch() -> None:
        os.read(0, 1)  # bounded: the process that watches this one closes it, or ends
        throttle.stop_throttling()

    threading.Thread(target=watch, daemon=True).start()


def describe(event: Mapping[str, Any]) -> str:
    """An event as a line for the user."""
    size = f"{event.get('bytes', 0) / 1e6:,.1f} MB"
    texts = {
        "uploading": f"uploading step {event.get('step')}: {size}",
        "uploaded": f"uploaded step {event.get('step')}: {event.get('name')}, {size}",
        "removed": f"removed {event.get('name')} from the target",
        "set_aside": f"{event.get('name')} at the target is not part of this run: kept as it is, not listed ({size})",
        "retry": event.get("text", ""),
        "failed": event.get("text", ""),
    }
    return texts.get(event["event"], "")
