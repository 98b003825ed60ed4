"""Trains under fire: strikes a random process of the run every few seconds, while lost workers return.

    python benchmarks/soak.py --text FILE [--minutes 30] [--every 10] [--out build/soak.md] [flags of launch/train.py]

The run is 2 stages x 3 replicas with exact sums, a stub for each worker as under a launcher. A strike kills (SIGKILL)
or stops (SIGSTOP) a worker, a guardian, the coordinator or a stub, which is what a launcher has started. A worker, and
what it lives below, is only struck if the run can do without it: its stage has another replica, and all earlier victims
are out of the grid. In place of a killed stub another process joins the run (`--join`), as a machine's supervisor would
start it; a stopped one goes on after some seconds. The stub above the coordinator is spared: on one host, as here, the
run ends with it (docs/elastic.md).

At the end every place must be taken; the losses must be, bit for bit, those of one undisturbed process that trains as
many steps on the same text; and no process may have gained memory, threads or files beyond the bounds of
soak_report.py. Ends with 1 if not. Ctrl-C ends the run, too, as it does by hand: without the wait for the last victims.
Needs Linux (/proc).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.soak_report import Event, Sample, judge, write_report
from benchmarks.soak_run import ShotRun, UndisturbedRun

STRIKES = (
    *(("kill", "rank"),) * 5,
    *(("stop", "rank"),) * 2,
    *(("kill", "guardian"),) * 2,
    ("stop", "guardian"),
    *(("kill", "coordinator"),) * 2,
    ("stop", "coordinator"),
    *(("kill", "stub"),) * 2,
    ("stop", "stub"),
)
"""Drawn from: a kind of signal, a kind of process."""
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
SAMPLE_EVERY_S = 5.0
START_S = 180.0
HEAL_S = 120.0
"""For the last victims to come back."""
STOP_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Strike:
    """A signal to a process."""

    kind: str
    name: str
    pid: int


def main() -> int:
    options, flags = parse_arguments()
    flags = [f'data.sources=["{Path(options.text).resolve()}"]', *flags]
    with TemporaryDirectory() as temporary:
        folder = Path(options.folder or temporary).resolve()
        run = ShotRun(folder, flags)
        undisturbed = UndisturbedRun(folder / "undisturbed", flags)
        try:
            if options.compare:
                undisturbed.start(options.compare)
            run.await_steps(10, START_S)
            events, samples, is_interrupted = strike_for(run, options)
            is_whole = None if is_interrupted else run.await_whole(HEAL_S)
            samples.append(run.sample())
            if not is_interrupted:
                run.press_ctrl_c()
            codes = run.await_end(STOP_S)
            lines = run.lines()
            num_steps = max(line["step"] for line in lines if "event" not in line)
            print(f"{num_steps} steps, exit codes {codes}; one process trains as many", flush=True)
            if not options.compare:
                undisturbed.start(num_steps)
            verdict = judge(lines, undisturbed.lines(), samples, is_whole=is_whole, codes=codes)
        finally:
            run.end()
            undisturbed.end()
    text = write_report(lines, events, samples, verdict, options)
    print(text if not options.out else "\n".join(verdict.findings))
    if options.out:
        Path(options.out).parent.mkdir(parents=True, exist_ok=True)
        Path(options.out).write_text(text)
    return 0 if verdict.is_right else 1


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--text", required=True, help="text to train on")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two strikes")
    parser.add_argument("--seed", type=int, default=0, help="of the draw of strikes")
    parser.add_argument("--compare", type=int, help="steps of an undisturbed run beside it; default: all, after it")
    parser.add_argument("--folder", help="keep the run here")
    parser.add_argument("--out", help="Markdown file for the log")
    return parser.parse_known_args()


def strike_for(run: ShotRun, options: argparse.Namespace) -> tuple[list[Event], list[Sample], bool]:
    """Strikes until the time is over, or Ctrl-C; returns what was done, the sizes of all processes meanwhile, and
    whether it was Ctrl-C."""
    events: list[Event] = []
    samples: list[Sample] = []
    try:
        strike_until(time.monotonic() + 60 * options.minutes, run, options, events, samples)
    except KeyboardInterrupt:
        return events, samples, True
    return events, samples, False


def strike_until(
    end_s: float, run: ShotRun, options: argparse.Namespace, events: list[Event], samples: list[Sample]
) -> None:
    draw = random.Random(options.seed)
    begun_s = time.monotonic()
    strike_s, sample_s = begun_s + options.every, begun_s
    while (now_s := time.monotonic()) < end_s:
        run.check_alive()
        if now_s >= sample_s:
            samples.append(run.sample())
            sample_s += SAMPLE_EVERY_S
        if now_s >= strike_s and (strike := choose(run, draw)):
            strike_s = max(strike_s + options.every, now_s + 0.5 * options.every)
            event = Event(at_s=now_s - begun_s, what=f"{strike.kind} {strike.name}", step=run.last_step())
            events.append(event)
            print(f"{event.at_s:7.1f} s, step {event.step}: {event.what}; width {run.widths()}", flush=True)
            carry_out(strike, run)
        time.sleep(0.1)


def choose(run: ShotRun, draw: random.Random) -> Strike | None:
    """Draws a strike that the run can survive; None if there is none now."""
    kind, target = draw.choice(STRIKES)
    candidates = [process for process in run.processes() if process.role == target and process.is_running]
    if target == "stub":
        candidates = [process for process in candidates if process.pid not in run.stubs_of_coordinators()]
    if target != "coordinator":
        spared = run.indispensable()
        candidates = [process for process in candidates if process.rank is not None and process.rank not in spared]
    if not candidates:
        return None
    victim = draw.choice(sorted(candidates, key=lambda process: process.rank or 0))
    if victim.rank is not None and (kind, target) != ("stop", "stub"):  # which costs no worker
        run.note_victim(victim.rank)
    above = {"guardian": "the guardian of ", "stub": "the stub of "}.get(target, "")
    name = "the coordinator" if target == "coordinator" else f"{above}rank {victim.rank}"
    return Strike(kind=kind, name=name, pid=victim.pid)


def carry_out(strike: Strike, run: ShotRun) -> None:
    with contextlib.suppress(ProcessLookupError):  # it was on its way out
        os.kill(strike.pid, SIGNALS[strike.kind])
    if "stub" in strike.name:
        run.note_stub(strike.pid, is_stopped=strike.kind == "stop")


if __name__ == "__main__":
    sys.exit(main())
