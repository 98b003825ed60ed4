"""Progress of a run on the standard output: a bar on a terminal, else plain lines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol, TextIO

from tqdm import tqdm

PLAIN_EVERY_S = 10.0
PLAIN_EVERY_SHARE = 0.05


class ProgressDisplay(Protocol):
    """Shows the progress of the run."""

    def show(self, step: int, total: int | None, text: str, step_s: float) -> None: ...

    def log(self, text: str) -> None: ...

    def close(self) -> None: ...


class BarDisplay:
    """A progress bar on a terminal."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._bar: tqdm | None = None

    def show(self, step: int, total: int | None, text: str, step_s: float) -> None:
        if self._bar is None:
            tqdm.set_lock(threading.RLock())  # its default lock is made for processes
            layout = "step {n_fmt}/{total_fmt} |{bar}| {desc}" if total else "step {n_fmt}  {desc}"
            self._bar = tqdm(total=total, file=self._stream, bar_format=layout, dynamic_ncols=True, miniters=1)
        self._bar.n = step
        self._bar.set_description_str(f"{text}{_eta(step, total, step_s)}")

    def log(self, text: str) -> None:
        tqdm.write(text, file=self._stream)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class PlainDisplay:
    """Plain lines for logs: about every 10 s or 5 % of the steps, the first and the last included."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic):
        self._stream = stream
        self._clock = clock
        self._last_step = 0
        self._last_time = -float("inf")

    def show(self, step: int, total: int | None, text: str, step_s: float) -> None:
        now = self._clock()
        far = total is not None and step - self._last_step >= max(1.0, PLAIN_EVERY_SHARE * total)
        if far or step == total or now - self._last_time >= PLAIN_EVERY_S:
            self._last_step, self._last_time = step, now
            self.log(f"step {step}/{total or '?'}  {text}{_eta(step, total, step_s)}")

    def log(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        return


def _eta(step: int, total: int | None, step_s: float) -> str:
    if not total or not step_s:
        return ""
    seconds = round((total - step) * step_s)
    hours, minutes = seconds // 3600, seconds // 60 % 60
    return f"  ETA {hours}:{minutes:02}:{seconds % 60:02}" if hours else f"  ETA {minutes}:{seconds % 60:02}"
