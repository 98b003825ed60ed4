"""Which frames a peer may send to the coordinator, and what they contain. Pure.

A peer that knows the run's secret may still be broken: another version, a bit of its memory flipped. A frame that is
not in this table, or not of this form, costs its sender the connection (and so a worker its place in the run), and the
coordinator nothing. What a frame means at its time is checked by those who handle it (ProtocolError as well).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from string import hexdigits
from typing import Any, TypeGuard, TypeVar

from parallel3d.errors import OutOfPlaceError, ProtocolError, shorten

MAX_TEXT = 2**20
MAX_ITEMS = 2**20
Check = Callable[[object], bool]
Fields = Mapping[str, Check]
Parsed = TypeVar("Parsed")


def is_count(value: object) -> bool:
    """True for an integer from 0 on."""
    return type(value) is int and 0 <= value < 2**63


def is_place(value: object) -> bool:
    """True for a place in a list, or the length of one."""
    return type(value) is int and 0 <= value <= MAX_ITEMS


def is_integer(value: object) -> bool:
    return type(value) is int and abs(value) < 2**63


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MAX_TEXT


def is_flag(value: object) -> bool:
    return isinstance(value, bool)


def is_object(value: object) -> bool:
    return isinstance(value, dict)


def is_hex(value: object) -> TypeGuard[str]:
    """True for bytes as hexadecimal digits."""
    return isinstance(value, str) and len(value) % 2 == 0 and all(digit in hexdigits for digit in value)


def is_address(value: object) -> TypeGuard[list[Any]]:
    """True for [host, port]."""
    return isinstance(value, list) and len(value) == 2 and is_text(value[0]) and is_count(value[1])


def is_pair(value: object) -> bool:
    """True for a list of two counts."""
    return isinstance(value, list) and len(value) == 2 and all(map(is_count, value))


def are_counts(value: object) -> bool:
    """True for a list of counts. Checked at once: a loss among 10,240 workers has 9,000 such lists."""
    if not isinstance(value, list) or len(value) > MAX_ITEMS:
        return False
    return not value or (set(map(type, value)) == {int} and min(value) >= 0 and max(value) < 2**63)


def or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and len(value) <= MAX_ITEMS and all(map(check, value))


def object_of(**fields: Check) -> Check:
    """An object with these fields, and any others."""
    return lambda value: (
        isinstance(value, dict) and all(name in value and ok(value[name]) for name, ok in fields.items())
    )


_END = object_of(
    rank=is_count,
    exit_code=is_integer,
    by_guardian=is_flag,
    why=is_text,
    detect_s=or_none(is_number),
    step=or_none(is_count),
    permission=is_text,
)
_ERROR = object_of(text=is_text, is_run_wide=is_flag, exit_code=is_integer, consequence=is_flag, step=or_none(is_count))
_STATE = object_of(newest_generation=is_integer, committed_generation=is_integer)
_JOIN = object_of(part=or_none(is_pair), is_ready=is_flag)
_TIMEOUTS = object_of(heartbeat_timeout_s=is_number, watchdog_timeout_s=is_number)
_STATUS = object_of(doing=is_text, for_s=is_number, is_waiting=is_flag, what=is_text, peers=are_counts)
_TARGET = object_of(
    **dict.fromkeys(("rank", "stage", "replica"), or_none(is_count)),
    host=or_none(is_text),
)

HELLO: dict[str, Fields] = {
    "worker": {"ranks": are_counts, "host": is_text, "log": is_text},
    "guardian": {"ranks": are_counts, "host": is_text, "address": is_address},
    "relay": {},
    "operator": {},
}
"""Fields of a hello, by its role."""

FRAMES: dict[str, dict[str, Fields]] = {
    "worker": {
        "publish": {"record": is_object},
        "error": {"error": _ERROR},
        "finish": {"exit_code": is_integer, "permission": is_text},
        "announce_drain": {},
        "worker_status": {"status": _STATUS},
        "probed": {"round": is_count, "unreachable": are_counts},
        "set": {"key": is_text},
        "get": {"key": is_text, "id": is_count},
        "get_all": {"keys": list_of(is_text), "id": is_count},
        "gather": {"key": is_text, "size": is_place},
        "check": {"keys": list_of(is_text), "id": is_count},
        "add": {"key": is_text, "amount": is_integer, "id": is_count},
        "compare": {"key": is_text, "size": is_place, "numbers": list_of(is_place), "states": list_of(is_text)},
        "report": {"report": is_object},
        "entries": {"generation": is_integer},
        "request_record": {"generation": is_integer},
        "committed": {},
        "confirm": {"generation": is_integer, "digest": is_text, "moved_bytes": is_count},
        "suspect": {"generation": is_integer, "reason": is_text},
        "finish_generation": {"generation": is_integer},
        "ready": {},
    },
    "guardian": {
        "ended": {"ends": list_of(_END)},
        "stop": {"signal": is_count, "at_once": is_flag},
        "announce_drain": {},
        "announce_preemption": {"text": is_text, "seconds": is_count},
        "request_status": {},
        "offer_worker": {"slot": is_count},
        "ping": {},
        "from_workers": {"ranks": are_counts, "sizes": are_counts},
    },
    "relay": {
        "from_guardians": {
            "guardians": are_counts,
            "ranks": list_of(or_none(is_count)),
            "sizes": are_counts,
        },
        "guardian_lost": {"guardian": is_count},
        "ping": {},
    },
    "operator": {
        "reserve_worker": {},
        "drain": {"target": _TARGET},
    },
}
"""Fields of each frame after the hello, by its sender's role."""

RECORDS: dict[str, Fields] = {
    "step": {"step": is_count},
    "evaluation": {"step": is_count},
    "evaluating": {"step": is_count},
    "round_trip": {"seconds": is_number},
    "resumed": {"generation": is_count, "regroup_s": is_number, "plan": is_text},
    "notice": {"text": is_text},
    "balance": {"text": is_text, "step": is_count},
    "drain_slow": {"text": is_text, "step": is_count, "ranks": are_counts},
}
"""Fields of those published records that the coordinator reads, by their kind."""

OPTIONAL: Fields = {
    "membership_state": lambda value: _STATE(value) and _JOIN(value),
    "num_workers": is_count,
    "by_command": is_flag,
    "joined": are_counts,
    "monitor": or_none(_TIMEOUTS),
    **dict.fromkeys(("loss", "step_s", "tokens", "tokens_per_s"), or_none(is_number)),
}
"""Checked in frames and records that have them."""
PAYLOAD_OPS = ("set", "entries", "committed", "from_workers", "from_guardians")


def check_frame(role: str, header: dict[str, Any], payload: bytes) -> None:
    """Raises ProtocolError unless a peer may send this frame. `role` is "" before its hello."""
    op = header.get("op")
    if not isinstance(op, str):
        raise ProtocolError(f"a frame without op: {shorten(repr(header))}")
    _check_fields(op, header, _fields_of(role, op, header))
    if payload and op not in PAYLOAD_OPS:
        raise ProtocolError(f"{op!r} with {len(payload):,} bytes of payload")
    if op == "publish":
        record = header["record"]
        _check_fields(op, record, RECORDS.get(str(record.get("kind")), {}))


def parse(read: Callable[[Any], Parsed], data: object) -> Parsed:
    """Returns what `read` makes of a peer's data; raises OutOfPlaceError if it can't."""
    try:
        return read(data)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise OutOfPlaceError(f"malformed: {type(error).__name__}: {shorten(str(error))}") from None


def _fields_of(role: str, op: str, header: dict[str, Any]) -> Fields:
    if op == "hello" and not role:
        if not isinstance(header.get("role"), str) or header["role"] not in HELLO:
            raise ProtocolError(f"a hello of role {shorten(repr(header.get('role')))}")
        return HELLO[header["role"]]
    if op not in FRAMES.get(role, {}):
        raise ProtocolError(f"{shorten(repr(op))} from a {role or 'connection before its hello'}")
    return FRAMES[role][op]


def _check_fields(op: str, values: dict[str, Any], fields: Fields) -> None:
    if not OPTIONAL.keys().isdisjoint(values):
        fields = {**{name: check for name, check in OPTIONAL.items() if name in values}, **fields}
    for name, is_right in fields.items():
        if name not in values or not is_right(values[name]):
            found = shorten(repr(values[name])) if name in values else "missing"
            raise ProtocolError(f"{shorten(op)!r} with {name} {found}")
