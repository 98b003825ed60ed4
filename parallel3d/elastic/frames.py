"""The control channel's wire format, used at all ends: frames over TCP and socket pairs, no torch.

torch's TCPStore is not an option: it ignores its timeouts when its host hangs, dies with the rank that hosts it, and
cannot push news. A connection begins with a handshake (parallel3d/handshake.py); then come frames:

    header length (4 bytes) | payload length (4 bytes) | header: a JSON object | payload: bytes

Operations (`op` of the header), by sender:

    worker        hello, publish, error, finish, announce_drain, worker_status, probed
                  set, get, get_all, gather, check, add, compare    the key-value store
                  report, entries, confirm, suspect                 the membership protocol
                  request_record, committed, finish_generation
    guardian      hello, ended, stop, announce_drain, announce_preemption, request_status, ping, from_workers
    relay         hello, from_guardians, guardian_lost, ping
    coordinator   to both: stop, abort, request_status, ping
                  to workers: response, finish_ack, drain_request, drain_withdrawn, probe, finish_run
                              abort_generation, fetch_entries, entries, record, commit, fetch_committed
                  to guardians: welcome, failover_plan, monitor, kill, over, to_workers, close_worker, start_worker,
                              end_rejoins, leaves_slow
                  to relays: welcome, ping, to_guardians, close_guardian

A guardian relays for its workers, each at the other end of a socket pair: `from_workers` carries a batch of their
frames, `to_workers` one frame for several of them, both as they are. Between a guardian and its workers alone:

    worker        located                                           where it has found the coordinator
    guardian      connected, coordinator_lost, ping

On large runs under a launcher a relay (guardian/relay.py) stands between the guardians of a host and the coordinator.
To a guardian it speaks as the coordinator does, and adds `coordinator_lost`. `from_guardians` carries a batch of frames
with the number of each one's guardian, and the rank of each that is a worker's; `to_guardians` one frame for several.

What the coordinator accepts is checked before it is handled (frame_schemas.py).
"""

from __future__ import annotations

import json
import socket
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from parallel3d.errors import ProtocolError, shorten
from parallel3d.keepalive import keep_alive

MAX_HEADER_BYTES = 16 * 2**20
MAX_PAYLOAD_BYTES = 2**30
MAX_VALUE_BYTES = 16 * 2**20
"""Of a frame that a worker sends: a value that it stores."""
MAX_RELAYED_BYTES = MAX_VALUE_BYTES + MAX_HEADER_BYTES + 8
"""Of a frame that a guardian sends: a worker's largest frame, with its header."""
REPEATED_RECORDS = ("step", "evaluation")
"""Kinds of records of which a worker repeats the newest to a coordinator that takes over."""
CHUNK_BYTES = 2**16
RETRY_S = 0.1
KEEPALIVE_S = 8
PING_S = 1.0
"""Between two pings. Silence is counted in periods in which the listening process itself ran: a process that was
stopped and continued, or a whole machine that was, blames no other one."""

_LENGTHS = struct.Struct(">II")
_read_json = json.JSONDecoder().raw_decode
"""As json.loads for text without spaces around it, in half the time: a loss among 10,240 workers is 29,000 headers."""


def max_silent_pings(control_s: float) -> int:
    """Pings that may be sent without a frame of the other end before it counts as lost."""
    return max(1, round(control_s / PING_S))


def encode_frame(header: dict[str, Any], payload: bytes = b"") -> bytes:
    """Returns the bytes of one frame; raises TypeError if JSON can't carry the header."""
    return _encode_header(header, len(payload)) + payload


def encode_from_workers(frames: Sequence[tuple[int, bytes]]) -> bytes:
    """Returns a guardian's frame that carries (rank, frame) of its workers, in order."""
    ranks, encoded = zip(*frames, strict=True)
    header = {"op": "from_workers", "ranks": ranks, "sizes": [len(frame) for frame in encoded]}
    return encode_frame(header, b"".join(encoded))


def decode_from_workers(header: dict[str, Any], payload: bytes) -> Iterator[tuple[int, dict[str, Any], bytes]]:
    """Yields (rank, header, payload) of the frames that a guardian's frame carries; raises ProtocolError."""
    for rank, frame in split_from_workers(header, payload):
        yield rank, *decode_part(frame, f"rank {rank}")


def split_from_workers(header: dict[str, Any], payload: bytes) -> Iterator[tuple[int, memoryview]]:
    """Yields (rank, frame) of what a guardian's frame carries, as they are; raises ProtocolError."""
    yield from zip(header["ranks"], _split(header["sizes"], payload, len(header["ranks"])))


def encode_from_guardians(frames: Sequence[tuple[int, int | None, bytes | memoryview]]) -> bytes:
    """Returns a relay's frame that carries (number of a guardian, rank, frame) in order. The rank is None of a frame
    that is the guardian's own."""
    numbers, ranks, encoded = zip(*frames, strict=True)
    sizes = [len(frame) for frame in encoded]
    header = {"op": "from_guardians", "guardians": numbers, "ranks": ranks, "sizes": sizes}
    return encode_frame(header, b"".join(encoded))


def split_from_guardians(header: dict[str, Any], payload: bytes) -> Iterator[tuple[int, int | None, memoryview]]:
    """Yields (number of a guardian, rank, frame) of what a relay's frame carries, as they are; raises ProtocolError."""
    numbers, ranks = header["guardians"], header["ranks"]
    if len(numbers) != len(ranks):
        raise ProtocolError(f"{len(ranks)} frames of {len(numbers)} guardians")
    yield from zip(numbers, ranks, _split(header["sizes"], payload, len(ranks)))


def decode_part(frame: memoryview, sender: str) -> tuple[dict[str, Any], bytes]:
    """Returns (header, payload) of one of the frames that another one carries; raises ProtocolError."""
    size = len(frame)
    header_bytes, payload_bytes = _LENGTHS.unpack_from(frame) if size >= _LENGTHS.size else (0, 0)
    payload_start = _LENGTHS.size + header_bytes
    if header_bytes > MAX_HEADER_BYTES or payload_bytes > MAX_VALUE_BYTES or payload_start + payload_bytes != size:
        lengths = f"lengths {header_bytes} and {payload_bytes}"
        raise ProtocolError(f"not one frame of {sender} in {size} bytes: {lengths}")
    return _decode_header(frame[_LENGTHS.size : payload_start]), bytes(frame[payload_start:])


def _split(sizes: Sequence[int], payload: bytes, number: int) -> Iterator[memoryview]:
    if len(sizes) != number or sum(sizes) != len(payload):
        raise ProtocolError(f"{len(payload)} bytes of {number} frames, sizes {sizes}")
    view, end = memoryview(payload), 0
    for size in sizes:
        yield view[end : end + size]
        end += size


def encode_to_workers(ranks: Iterable[int], frame: bytes) -> bytes:
    """Returns the beginning of a frame that a guardian passes on to `ranks`; `frame` itself follows it."""
    return _with_lengths(_to_workers(tuple(ranks)), len(frame))


def encode_to_guardians(numbers: Sequence[int], frame: bytes) -> bytes:
    """Returns the beginning of a frame that a relay passes on to these guardians; `frame` itself follows it."""
    return _encode_header({"op": "to_guardians", "guardians": numbers}, len(frame))


def encode_to_their_workers(receivers: Sequence[tuple[int, int]], frame: bytes) -> bytes:
    """Returns the beginning of a frame that a relay passes on to workers: (number of the guardian, rank). `frame`
    itself follows it."""
    numbers, ranks = zip(*receivers, strict=True)
    return _encode_header({"op": "to_guardians", "guardians": numbers, "ranks": ranks}, len(frame))


def _encode_header(header: dict[str, Any], num_payload_bytes: int) -> bytes:
    return _with_lengths(json.dumps(header).encode(), num_payload_bytes)


@lru_cache(maxsize=4096)
def _to_workers(ranks: tuple[int, ...]) -> bytes:
    """Cached: several frames in a row go to the same workers of each guardian."""
    return json.dumps({"op": "to_workers", "ranks": ranks}).encode()


def _with_lengths(text: bytes, num_payload_bytes: int) -> bytes:
    return _LENGTHS.pack(len(text), num_payload_bytes) + text


def _decode_header(encoded: bytearray | memoryview) -> dict[str, Any]:
    try:
        text = str(encoded, "utf-8")
        header, end = _read_json(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not a control frame: {error}") from None
    if not isinstance(header, dict) or end != len(text):
        raise ProtocolError(f"not a control frame: header {shorten(text)}")
    return header


class FrameReader:
    """Splits a byte stream into frames, whatever the chunks it arrives in."""

    def __init__(self, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> None:
        self._bytes = bytearray()
        self._max_payload_bytes = max_payload_bytes

    def feed(self, data: bytes | memoryview) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Yields (header, payload) of each frame that `data` completes; raises ProtocolError if it isn't a frame."""
        for header, frame, start in self._split(data):
            yield header, frame[start:]

    def feed_whole(self, data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Yields (header, whole frame as it came) of each frame that `data` completes; raises ProtocolError."""
        for header, frame, _ in self._split(data):
            yield header, frame

    def _split(self, data: bytes | memoryview) -> Iterator[tuple[dict[str, Any], bytes, int]]:
        """Yields (header, frame, where its payload begins)."""
        self._bytes += data
        while len(self._bytes) >= _LENGTHS.size:
            header_bytes, payload_bytes = _LENGTHS.unpack_from(self._bytes)
            if header_bytes > MAX_HEADER_BYTES or payload_bytes > self._max_payload_bytes:
                raise ProtocolError(f"not a control frame: lengths {header_bytes} and {payload_bytes}")
            start, end = _LENGTHS.size + header_bytes, _LENGTHS.size + header_bytes + payload_bytes
            if len(self._bytes) < end:
                return
            header = _decode_header(self._bytes[_LENGTHS.size : start])
            frame = bytes(self._bytes[:end])
            del self._bytes[:end]
            yield header, frame, start


def set_socket_options(connection: socket.socket) -> None:
    """Disables Nagle's delay, and has a host that vanished silently detected within `KEEPALIVE_S`, over TCP."""
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(connection, idle_s=2, interval_s=1, num_probes=KEEPALIVE_S - 2)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, KEEPALIVE_S * 1000)
