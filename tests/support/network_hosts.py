"""Hosts on one machine: network namespaces, and a switch between them that loses, delays and cuts.

    host 1: namespace, 10.77.0.1, TUN device --\
    host 2: namespace, 10.77.0.2, TUN device ---- a thread of the test: reads each packet, and passes it on or not
    host 3: ...                               --/

The switch is in the test's own process, so that a cut is silent, takes effect at once and needs neither iptables nor
`tc netem`, which many kernels lack. Each host has its own name. Nothing outside the namespaces changes; they end with
the test. Run as a script (NAME ADDRESS DESCRIPTOR), this file is the process that holds one namespace.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import os
import random
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MTU = 9000
MAX_HOSTS = 9
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Weather:
    """What happens to packets."""

    cut: frozenset[tuple[int, int]] = frozenset()
    """Directions (from host, to host) in which none arrives; hosts count from 1."""
    loss: float = 0.0
    """Share of packets that are lost."""
    delay_s: float = 0.0
    """Of every packet."""


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
            for pid in pids:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


class Network:
    """A number of hosts and the switch between them. `weather` may be changed at any time."""

    def __init__(self, num_hosts: int):
        self.weather = Weather()
        self.hosts = [_start_host(number) for number in range(1, num_hosts + 1)]
        self._random = random.Random(1)
        self._late: list[tuple[float, int, int, bytes]] = []
        self._numbers = itertools.count()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._switch, daemon=True, name="switch")
        self._thread.start()

    def cut_host(self, number: int) -> None:
        """Separates one host from all others."""
        self.cut(*((number, other.number) for other in self.hosts if other.number != number))

    def cut(self, *pairs: tuple[int, int]) -> None:
        """Cuts these pairs of hosts in both directions, and heals all else."""
        self.weather = Weather(cut=frozenset(pairs) | {(after, before) for before, after in pairs})

    def close(self) -> None:
        for host in self.hosts:
            host.kill_all()
        self._closing.set()
        self._thread.join(timeout=10)
        for host in self.hosts:
            host.holder.kill()
            host.holder.wait(timeout=10)
            os.close(host.packets)

    def _switch(self) -> None:
        selector = selectors.DefaultSelector()
        for host in self.hosts:
            os.set_blocking(host.packets, False)
            selector.register(host.packets, selectors.EVENT_READ, host.number)
        while not self._closing.is_set():
            wait_s = max(0.0, self._late[0][0] - time.monotonic()) if self._late else 0.1
            for key, _ in selector.select(min(wait_s, 0.1)):
                with contextlib.suppress(BlockingIOError):
                    for _ in range(64):
                        self._route(key.data, os.read(key.fd, MTU + 100))
            while self._late and self._late[0][0] <= time.monotonic():
                _, _, number, packet = heapq.heappop(self._late)
                self._deliver(number, packet)

    def _route(self, source: int, packet: bytes) -> None:
        """Passes a packet on as the weather allows: IPv4 with a destination 10.77.0.<number>."""
        destination, weather = packet[19], self.weather
        is_known = packet[0] >> 4 == 4 and packet[16:19] == b"\x0a\x4d\x00" and 0 < destination <= len(self.hosts)
        if not is_known or (source, destination) in weather.cut or self._random.random() < weather.loss:
            return
        if weather.delay_s:
            due = time.monotonic() + weather.delay_s
            heapq.heappush(self._late, (due, next(self._numbers), destination, packet))
        else:
            self._deliver(destination, packet)

    def _deliver(self, destination: int, packet: bytes) -> None:
        with contextlib.suppress(OSError):  # a full queue drops packets, as switches do
            os.write(self.hosts[destination - 1].packets, packet)


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
        command = [sys.executable, __file__, name, address, str(theirs.fileno())]
        holder = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, stdin=subprocess.PIPE)
        theirs.close()
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
        if not descriptors:
            _, error = holder.communicate(timeout=20)
            raise OSError(error.decode().strip().splitlines()[-1] if error else "the holder has ended")
    return Host(number=number, name=name, address=address, holder=holder, packets=descriptors[0])


def _hold(name: str, address: str, descriptor: int) -> None:
    """Makes the namespace, hands its TUN device to the parent, and stays until the parent ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET | CLONE_NEWUTS | CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    socket.sethostname(name)
    _name_hosts()
    packets = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(packets, TUNSETIFF, struct.pack("16sH", b"net0", IFF_TUN | IFF_NO_PI))
    for words in (
        "link set lo up",
        f"link set net0 mtu {MTU} up",
        f"address add {address}/24 dev net0",
    ):
        subprocess.run(["ip", *words.split()], check=True)
    with socket.socket(fileno=descriptor) as parent:
        socket.send_fds(parent, [b"x"], [packets])
    os.close(packets)
    sys.stdin.read()


def _name_hosts() -> None:
    """Makes the hosts' names known, in this namespace alone."""
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    with tempfile.NamedTemporaryFile("w") as file:
        lines = ["127.0.0.1 localhost", *(f"10.77.0.{number} host{number}" for number in range(1, MAX_HOSTS + 1))]
        file.write("\n".join(lines) + "\n")
        file.flush()
        subprocess.run(["mount", "--bind", file.name, "/etc/hosts"], check=True)


if __name__ == "__main__":
    _hold(sys.argv[1], sys.argv[2], int(sys.argv[3]))
