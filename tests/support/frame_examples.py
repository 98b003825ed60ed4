"""A frame of each kind that the coordinator knows, as a worker, a guardian, a relay or a command sends it."""

from __future__ import annotations

from typing import Any

from parallel3d.elastic.protocol.membership import StateReport

END = dict(rank=1, exit_code=-9, by_guardian=False, why="", detect_s=0.5, step=None, permission="")
STATUS = dict(doing="step 3", for_s=0.5, is_waiting=True, what="world", peers=[1])
ERROR = dict(text="ValueError", is_run_wide=False, exit_code=1, consequence=False, step=3)
GOOD: dict[str, dict[str, dict[str, Any]]] = {
    "worker": {
        "publish": {"record": {"kind": "step", "step": 1, "loss": 0.5, "tokens": 8}},
        "error": {"error": ERROR},
        "finish": {"exit_code": 0, "permission": "finished"},
        "announce_drain": {},
        "worker_status": {"status": STATUS},
        "probed": {"round": 0, "unreachable": []},
        "set": {"key": "a"},
        "get": {"key": "a", "id": 0},
        "get_all": {"keys": ["a"], "id": 1},
        "gather": {"key": "a", "size": 3},
        "check": {"keys": ["a"], "id": 2},
        "add": {"key": "a", "amount": -1, "id": 3},
        "compare": {"key": "a", "size": 2, "numbers": [0, 7], "states": ["", "b"]},
        "report": {"report": StateReport(rank=1, generation=0).to_json()},
        "entries": {"generation": 0},
        "request_record": {"generation": 0},
        "committed": {},
        "confirm": {"generation": 0, "digest": "", "moved_bytes": 0},
        "suspect": {"generation": -1, "reason": "why"},
        "finish_generation": {"generation": 0},
        "ready": {},
    },
    "guardian": {
        "ended": {"ends": [END]},
        "stop": {"signal": 15, "at_once": False},
        "announce_drain": {},
        "announce_preemption": {"text": "aws: spot terminate", "seconds": 120},
        "request_status": {},
        "offer_worker": {"slot": 0},
        "ping": {},
        "from_workers": {"ranks": [1], "sizes": [3]},
    },
    "relay": {
        "from_guardians": {"guardians": [0, 1], "ranks": [None, 1], "sizes": [3, 4]},
        "guardian_lost": {"guardian": 0},
        "ping": {},
    },
    "operator": {
        "reserve_worker": {},
        "drain": {"target": {"rank": 1, "stage": None, "replica": None, "host": None}},
    },
}
"""After the hello, by its sender's role."""
HELLOS: dict[str, dict[str, Any]] = {
    "worker": {"ranks": [1], "host": "here", "log": ""},
    "guardian": {"ranks": [0, 1], "host": "here", "address": ["127.0.0.1", 1]},
    "relay": {},
    "operator": {},
}
