"""Fetches a checkpoint from a remote store: `parallel3d fetch s3://bucket/runs/name FOLDER`.

The address is that of one checkpoint, or of a target of uploads, whose newest complete one is taken. Every byte is
verified; FOLDER/step-... appears whole or not at all, and an interrupted fetch goes on with the files that are missing.
Exit codes: 0 done, 2 nothing complete there, or it can't be read.
"""

from __future__ import annotations

import sys

from parallel3d.checkpoint.directory import CheckpointDirectory
from parallel3d.checkpoint.fetch import Fetched, fetch_into_cache, fetch_newest
from parallel3d.checkpoint.remote_directory import RemoteDirectory
from parallel3d.checkpoint.store_process import EventPrinter, say
from parallel3d.child_process import end_with_parent
from parallel3d.commands.parsers import parse
from parallel3d.errors import UserError
from parallel3d.remote_address import redacted
from parallel3d.remote_files import problem_of


def main(arguments: list[str]) -> int:
    options = parse("fetch", arguments)
    events = EventPrinter() if options.events else None
    if events is not None:
        end_with_parent()

    def tell(event: str, text: str) -> None:
        if events is not None:
            events({"event": event, "text": text})
        else:
            say(text)

    def on_start(where: str, num_bytes: int) -> None:
        tell("fetching", f"fetching {where}: {num_bytes / 1e6:,.1f} MB")

    beat = events.beat if events else lambda: None
    try:
        remote = RemoteDirectory(options.source, log=lambda text: tell("retry", text), check=beat)
        if options.cache:
            fetched = fetch_into_cache(remote, options.source, options.cache, on_start)
        elif options.folder is None:
            raise UserError("give the folder into which the checkpoint is copied")
        else:
            place, newer_than = CheckpointDirectory(options.folder), options.newer_than
            fetched = fetch_newest(remote, place, newer_than=newer_than, resumable=options.resumable, on_start=on_start)
    except UserError as error:
        tell("failed", str(error))
        return error.exit_code
    except OSError as error:
        tell("failed", f"can't write {options.folder} ({error.strerror})")
        return UserError.exit_code
    except Exception as error:  # whatever a driver raises; its traceback may quote credentials
        tell("failed", f"{redacted(options.source)}: {problem_of(error)}")
        return UserError.exit_code
    if events is not None:
        path = str(fetched.path) if fetched.path else None
        events({"event": "fetched", "path": path, "skipped": list(fetched.skipped)})
        return 0
    return show(fetched, options.source)


def show(fetched: Fetched, source: str) -> int:
    for text in fetched.skipped:
        print(f"checkpoint skipped: {text}", file=sys.stderr)
    if fetched.path is None:
        print(f"no complete checkpoint at {redacted(source)}", file=sys.stderr)
        return UserError.exit_code
    print(fetched.path)
    return 0
