"""A stub whose guardian asks for another coordinator before the stub can know that its own was killed; run as a script.

Its exit code is EXIT_CODE, if the second coordinator is started at that request. With the argument `answered` the
guardian has reached a coordinator between the two, so no other may be started; with `ended` it has given up, as it does
if the stub is stopped for so long, with EXIT_CODE; with `collected` as well the coordinator was collected before.
Nothing here depends on time: the stub
is stopped until all has been sent and the coordinator is a zombie.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from parallel3d.elastic.child_processes import ParentLink
from parallel3d.elastic.protocol.membership import Address
from parallel3d.elastic.settings import LaunchTimeouts
from parallel3d.elastic.stub import ChildPrograms, Message, Stub

EXIT_CODE = 17
ANSWERED, ENDED, COLLECTED = "answered", "ended", "collected"
REQUEST = {"op": "take_over", "failover_plan": "as the guardian knows it"}


class Programs(ChildPrograms):
    def __init__(self) -> None:
        self._from_coordinators, self._to_guardian = os.pipe()

    @property
    def first_coordinator(self) -> Address:
        return ("127.0.0.1", 1)

    known_address = first_coordinator

    @property
    def has_relay(self) -> bool:
        return False

    def run_coordinator(self, link: ParentLink, failover: Message | None) -> int:
        if failover is None:
            link.send({"op": "start", "secret": ""})
            os.write(self._to_guardian, f"{os.getpid()}\n".encode())
            signal.pause()  # until the guardian kills it
        assert failover == REQUEST and ENDED not in sys.argv
        link.send({"op": "done", "exit_code": EXIT_CODE})
        os.write(self._to_guardian, b"again\n")
        return 0

    def run_guardian(self, link: ParentLink) -> int:
        while not any(message["op"] == "start" for message in link.receive()):
            pass
        words = os.fdopen(self._from_coordinators)
        coordinator, stub = int(words.readline()), os.getppid()
        if COLLECTED in sys.argv:
            os.kill(coordinator, signal.SIGKILL)
            while Path(f"/proc/{coordinator}").exists():
                time.sleep(0.001)
        os.kill(stub, signal.SIGSTOP)
        wait_for_state(stub, "T")
        link.send(REQUEST)
        if ANSWERED in sys.argv:
            link.send({"op": "located", "address": list(self.first_coordinator), "secret": ""})
        if ENDED in sys.argv:
            link.send({"op": "ended", "exit_code": EXIT_CODE})
        if COLLECTED not in sys.argv:
            os.kill(coordinator, signal.SIGKILL)
            wait_for_state(coordinator, "Z")
        os.kill(stub, signal.SIGCONT)
        if ENDED in sys.argv:
            signal.pause()  # until the stub ends
        assert words.readline() == "again\n"
        link.send({"op": "ended", "exit_code": EXIT_CODE})
        signal.pause()  # until the stub ends
        return 0

    def run_relay(self, link: ParentLink, request: Message) -> int:
        raise AssertionError("there is no relay")


def wait_for_state(pid: int, state: str) -> None:
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != state:
        time.sleep(0.001)


if __name__ == "__main__":
    timeouts = LaunchTimeouts(failover_s=1.0 if ANSWERED in sys.argv else 60.0)
    sys.exit(Stub(Programs(), timeouts=timeouts, parent=None).run())
