"""The switch between the hosts of `network_hosts.py`: a process of its own, which loses, delays and cuts.

In a thread of the test it would wait for the test's Python, and among the processes of the hosts for a core: then it is
the switch that drops packets, and healthy hosts look cut off. So it runs before all of them, where that is allowed.

Run as a script with the descriptors of the hosts' TUN devices. Each line of standard input is a weather as JSON; the
answer, an empty line, says that it holds.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import math
import os
import random
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

MAX_PACKET = 9100
"""In bytes; above the MTU of the devices."""
MAX_IN_TURN = 64
"""Packets of one host that are passed on before the next host has its turn."""


@dataclass(frozen=True, kw_only=True)
class Weather:
    """What happens to packets."""

    cut: frozenset[tuple[int, int]] = frozenset()
    """Directions (from host, to host) in which none arrives; hosts count from 1."""
    loss: float = 0.0
    """Share of packets that are lost."""
    delay_s: float = 0.0
    """Of every packet."""
    narrow_host: int = 0
    """The host whose line carries only `bytes_per_s` in each direction; 0: none."""
    bytes_per_s: float = math.inf

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "cut": sorted(self.cut)})

    @staticmethod
    def from_json(text: str) -> Weather:
        fields = json.loads(text)
        return Weather(**{**fields, "cut": frozenset(tuple(each) for each in fields["cut"])})


class SwitchProcess:
    """The test's hold of the switch; `packets` are the descriptors of the hosts' devices, in the hosts' order."""

    def __init__(self, packets: Sequence[int]):
        command = [sys.executable, __file__, *map(str, packets)]
        self._process = subprocess.Popen(
            command, pass_fds=packets, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def set_weather(self, weather: Weather) -> None:
        """Returns once no packet is treated by the weather before."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(weather.to_json() + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "\n", "the switch has ended"

    def close(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=300)


class _Switch:
    def __init__(self, packets: Sequence[int]):
        self._packets = packets
        self._weather = Weather()
        self._random = random.Random(1)
        self._late: list[tuple[float, int, int, bytes]] = []
        self._free_s = {"from": 0.0, "to": 0.0}
        """When the narrow host's line has carried what it has been given, in each direction."""
        self._numbers = itertools.count()

    def run(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(sys.stdin, selectors.EVENT_READ, None)
        for number, descriptor in enumerate(self._packets, start=1):
            os.set_blocking(descriptor, False)
            selector.register(descriptor, selectors.EVENT_READ, number)
        while True:
            wait_s = max(0.0, self._late[0][0] - time.monotonic()) if self._late else None
            for key, _ in selector.select(wait_s):
                if key.data is None:
                    if not (line := sys.stdin.readline()):
                        return
                    self._weather = Weather.from_json(line)
                    print(flush=True)
                    continue
                with contextlib.suppress(BlockingIOError):
                    for _ in range(MAX_IN_TURN):
                        self._route(key.data, os.read(key.fd, MAX_PACKET))
            while self._late and self._late[0][0] <= time.monotonic():
                _, _, number, packet = heapq.heappop(self._late)
                self._deliver(number, packet)

    def _route(self, source: int, packet: bytes) -> None:
        """Passes a packet on as the weather allows: IPv4 with a destination 10.77.0.<number>."""
        destination, weather = packet[19], self._weather
        is_known = packet[0] >> 4 == 4 and packet[16:19] == b"\x0a\x4d\x00" and 0 < destination <= len(self._packets)
        if not is_known or (source, destination) in weather.cut or self._random.random() < weather.loss:
            return
        now = due = time.monotonic()
        if weather.narrow_host in (source, destination):
            way = "from" if source == weather.narrow_host else "to"
            due = self._free_s[way] = max(now, self._free_s[way]) + len(packet) / weather.bytes_per_s
        due += weather.delay_s
        if due > now:
            heapq.heappush(self._late, (due, next(self._numbers), destination, packet))
        else:
            self._deliver(destination, packet)

    def _deliver(self, destination: int, packet: bytes) -> None:
        with contextlib.suppress(OSError):  # a full queue drops packets, as switches do
            os.write(self._packets[destination - 1], packet)


def _go_first() -> None:
    """Runs before all other processes of this machine, or at least gets the largest share."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


if __name__ == "__main__":
    _go_first()
    _Switch([int(word) for word in sys.argv[1:]]).run()
