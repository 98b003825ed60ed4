"""Hosts on one machine: network namespaces, and a switch between them that loses, delays and cuts.

    host 1: namespace, 10.77.0.1, TUN device --\
    host 2: namespace, 10.77.0.2, TUN device ---- network_switch.py: reads each packet, and passes it on or not
    host 3: ...                               --/

The switch is a process of the test, so that a cut is silent, takes effect at once and needs neither iptables nor
`tc netem`, which many kernels lack. Each host has its own name. Nothing outside the namespaces changes; they end with
the test.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.network_switch import SwitchProcess, Weather

ROOT = Path(__file__).parents[2]
HOLDER = str(Path(__file__).with_name("network_holder.py"))


@dataclass(frozen=True, kw_only=True)
class Host:
    """One namespace."""

    number: int
    name: str
    address: str
    holder: subprocess.Popen[bytes]
    packets: int
    """Descriptor of its TUN device."""

    def popen(self, command: list[str], **options: Any) -> subprocess.Popen[str]:
        """Starts a command on this host; the process is the command's own."""
        enter = ["nsenter", "--target", str(self.holder.pid), "--net", "--uts", "--mount", "--wd=.", "--"]
        return subprocess.Popen(
            [*enter, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
        )

    def pids(self) -> list[int]:
        """All processes on this host but the holder."""
        namespace = os.readlink(f"/proc/{self.holder.pid}/ns/net")
        found = []
        for each in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if each.name.isdigit() and os.readlink(each / "ns" / "net") == namespace:
                    found.append(int(each.name))
        return [pid for pid in found if pid != self.holder.pid]

    def kill_all(self) -> None:
        """Kills every process on this host, as the loss of the machine would, but its kernel still answers."""
        while pids := self.pids():
            for number in (signal.SIGSTOP, signal.SIGKILL):  # none sees another one die and tells of it
                for pid in pids:
                    with contextlib.suppress(OSError):
                        os.kill(pid, number)
            time.sleep(0.01)


class Network:
    """A number of hosts and the switch between them. `weather` may be changed at any time."""

    def __init__(self, num_hosts: int):
        self.hosts = [_start_host(number) for number in range(1, num_hosts + 1)]
        self._switch = SwitchProcess([host.packets for host in self.hosts])
        self._weather = Weather()

    @property
    def weather(self) -> Weather:
        return self._weather

    @weather.setter
    def weather(self, weather: Weather) -> None:
        self._switch.set_weather(weather)
        self._weather = weather

    def cut_host(self, number: int) -> None:
        """Separates one host from all others."""
        self.cut(*((number, other.number) for other in self.hosts if other.number != number))

    def cut(self, *pairs: tuple[int, int]) -> None:
        """Cuts these pairs of hosts in both directions, and heals all else."""
        self.weather = Weather(cut=frozenset(pairs) | {(after, before) for before, after in pairs})

    def close(self) -> None:
        for host in self.hosts:
            host.kill_all()
        self._switch.close()
        for host in self.hosts:
            host.holder.kill()
            host.holder.wait(timeout=10)
            os.close(host.packets)


@contextlib.contextmanager
def network_of(num_hosts: int) -> Iterator[Network]:
    """Hosts for the block."""
    network = Network(num_hosts)
    try:
        yield network
    finally:
        network.close()


def why_not() -> str:
    """Returns why namespaces can't be made here, or ""."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    if missing := [command for command in ("ip", "mount", "nsenter") if shutil.which(command) is None]:
        return f"{missing[0]} is not installed"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "there is no /dev/net/tun"
    try:
        with network_of(1):
            return ""
    except OSError as error:
        return f"a network namespace can't be made here ({error})"


def _start_host(number: int) -> Host:
    ours, theirs = socket.socketpair()
    name, address = f"host{number}", f"10.77.0.{number}"
    with ours, theirs:
        ours.settimeout(20)
        command = [sys.executable, HOLDER, name, address, str(theirs.fileno())]
        holder = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, stdin=subprocess.PIPE)
        theirs.close()
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
        if not descriptors:
            _, error = holder.communicate(timeout=300)
            raise OSError(error.decode().strip().splitlines()[-1] if error else "the holder has ended")
    return Host(number=number, name=name, address=address, holder=holder, packets=descriptors[0])
