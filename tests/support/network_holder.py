"""The process that holds the namespace of one host of `network_hosts.py`: NAME ADDRESS DESCRIPTOR, a script."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import sys
import tempfile

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MTU = 9000
MAX_HOSTS = 9


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
