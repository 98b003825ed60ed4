"""How generation records travel: as the difference from the last committed one, which all members hold. Pure.

After a loss or a join among 10,240 workers a whole record is 0.8 MB of JSON, the difference some hundred bytes, however
many have joined before; 21 kB if all listen at new ports. A worker that lacks the base asks for the whole record, which
is the difference from nothing. Ranks are written as ranges [start, stop), ports as one column of 16-bit numbers; the
text is compressed.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from parallel3d.elastic.protocol.membership import Address, GenerationRecord, LogPosition, LostWorker
from parallel3d.errors import ProtocolError
from parallel3d.parallel.grid import Grid, PartId

Json = Any
MAX_RECORD_BYTES = 64 * 2**20
"""Longest text of a record; that of 100,000 workers has 8 MB."""

_NOTHING = GenerationRecord(generation=-1, grid=Grid(()), previous=None, members=())


def record_frame(record: GenerationRecord, base: GenerationRecord | None) -> tuple[Json, bytes]:
    """Returns the frame, header and payload, of a record for members that hold `base`."""
    since = None if base is None else base.generation
    return {"op": "record", "generation": record.generation, "base": since}, encode_record(record, base)


def encode_record(record: GenerationRecord, base: GenerationRecord | None) -> bytes:
    """Returns the difference of `record` from `base`; None: the whole record."""
    since = base or _NOTHING
    data = {
        "base": None if base is None else base.generation,
        "generation": record.generation,
        "grid": _encode_grid(record.grid, since.grid),
        "previous": None if record.previous is None else _encode_grid(record.previous, since.grid),
        "members": _encode_set(record.members, since.members),
        "draining": list(record.draining),
        "evicted": [lost_worker.to_json() for lost_worker in record.evicted],
        "position": record.position.to_json(),
        "weights_gathered": record.weights_gathered,
        "parts": _encode_parts(record.parts, since.parts),
        "newcomers": _encode_set(record.newcomers, since.newcomers),
        "hosts": _encode_texts(record.hosts, since.hosts),
        "address_hosts": _encode_texts(_address_hosts(record), _address_hosts(since)),
        "ports": _encode_ports(record.addresses, since.addresses),
        "last_reported_step": record.last_reported_step,
        "reason": record.reason,
    }
    return zlib.compress(json.dumps(data, separators=(",", ":")).encode())


def decode_record(encoded: bytes, base: GenerationRecord | None) -> GenerationRecord:
    """Returns the record; raises ProtocolError if it is the difference from another base."""
    inflater = zlib.decompressobj()
    data = json.loads(inflater.decompress(encoded, MAX_RECORD_BYTES))
    since = _NOTHING if data["base"] is None else base
    if since is None or (since is base and since.generation != data["base"]):
        raise ProtocolError(f"record {data['generation']} is the difference from record {data['base']}")
    address_hosts = _decode_texts(data["address_hosts"], _address_hosts(since))
    return GenerationRecord(
        generation=data["generation"],
        grid=_decode_grid(data["grid"], since.grid),
        previous=None if data["previous"] is None else _decode_grid(data["previous"], since.grid),
        members=_decode_set(data["members"], since.members),
        draining=tuple(data["draining"]),
        evicted=tuple(LostWorker.from_json(lost_worker) for lost_worker in data["evicted"]),
        position=LogPosition.from_json(data["position"]),
        weights_gathered=data["weights_gathered"],
        parts=_decode_parts(data["parts"], since.parts),
        newcomers=_decode_set(data["newcomers"], since.newcomers),
        hosts=_decode_texts(data["hosts"], since.hosts),
        addresses=_decode_ports(data["ports"], address_hosts, since.addresses),
        last_reported_step=data["last_reported_step"],
        reason=data["reason"],
    )


def _encode_ranks(ranks: Iterable[int]) -> list[list[int]]:
    """Returns ascending ranks as ranges [start, stop)."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and ranges[-1][1] == rank:
            ranges[-1][1] = rank + 1
        else:
            ranges.append([rank, rank + 1])
    return ranges


def _decode_ranks(ranges: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(rank for start, stop in ranges for rank in range(start, stop))


def _encode_set(ranks: Iterable[int], base: Iterable[int]) -> list[list[list[int]]]:
    """Returns the ranks that are gone and those that have come; `ranks` are ascending."""
    now, before = set(ranks), set(base)
    return [_encode_ranks(sorted(before - now)), _encode_ranks(sorted(now - before))]


def _decode_set(data: Json, base: Iterable[int]) -> tuple[int, ...]:
    less, more = map(_decode_ranks, data)
    return tuple(sorted({*base} - {*less} | {*more}))


def _encode_parts(parts: Mapping[int, PartId], base: Mapping[int, PartId]) -> Json:
    """Returns the ranks that are gone, and [rank, stage, tensor-parallel rank] of each new or changed one."""
    more = [[rank, *parts[rank]] for rank in sorted(parts) if parts[rank] != base.get(rank)]
    return {"less": _encode_ranks(sorted(base.keys() - parts.keys())), "more": more}


def _decode_parts(data: Json, base: Mapping[int, PartId]) -> dict[int, PartId]:
    less = set(_decode_ranks(data["less"]))
    return {rank: part for rank, part in base.items() if rank not in less} | {
        rank: (stage, tp) for rank, stage, tp in data["more"]
    }


def _encode_grid(grid: Grid, base: Grid) -> Json:
    """Returns the ranks of those replicas of `base` that have gone or changed, and [stage, replica id, rank, ...] of
    each new one."""
    without, more = list[int](), list[list[int]]()
    for number, (stage, former) in enumerate(zip(grid.stages, _stages_of(base, len(grid.stages)))):
        if stage != former:
            without += [rank for replica, ranks in former.items() if stage.get(replica) != ranks for rank in ranks]
            more += [[number, d, *stage[d]] for d in sorted(stage) if stage[d] != former.get(d)]
    return {"num_stages": len(grid.stages), "without": _encode_ranks(sorted(without)), "more": more}


def _decode_grid(data: Json, base: Grid) -> Grid:
    grid = base.without(_decode_ranks(data["without"]))[0] if data["without"] else base
    if not data["more"]:
        return grid
    stages = [dict(stage) for stage in _stages_of(grid, data["num_stages"])]
    for number, replica, *ranks in data["more"]:
        stages[number][replica] = tuple(ranks)
    return Grid(tuple(map(MappingProxyType, stages)))


def _stages_of(base: Grid, num_stages: int) -> Sequence[Mapping[int, tuple[int, ...]]]:
    """The stages of a record's base; empty ones if there is none."""
    return base.stages if len(base.stages) == num_stages else ({},) * num_stages


def _encode_texts(texts: Mapping[int, str], base: Mapping[int, str]) -> Json:
    """Returns the ranks that are gone, and of each new text its ranks."""
    if texts == base:
        return None
    ranks_of: dict[str, list[int]] = {}
    for rank in sorted(texts):
        if texts[rank] != base.get(rank):
            ranks_of.setdefault(texts[rank], []).append(rank)
    more = [[text, _encode_ranks(ranks)] for text, ranks in ranks_of.items()]
    return {"less": _encode_ranks(sorted(base.keys() - texts.keys())), "more": more}


def _decode_texts(data: Json, base: Mapping[int, str]) -> Mapping[int, str]:
    if data is None:
        return base
    less = set(_decode_ranks(data["less"]))
    texts = {rank: text for rank, text in base.items() if rank not in less}
    for text, ranges in data["more"]:
        texts.update(dict.fromkeys(_decode_ranks(ranges), text))
    return texts


def _address_hosts(record: GenerationRecord) -> dict[int, str]:
    return {rank: host for rank, (host, _) in record.addresses.items()}


def _encode_ports(addresses: Mapping[int, Address], base: Mapping[int, Address]) -> tuple[list[list[int]], str]:
    """Returns the ranks with a new port, and these ports."""
    new = [rank for rank in sorted(addresses) if rank not in base or addresses[rank][1] != base[rank][1]]
    column = struct.pack(f">{len(new)}H", *(addresses[rank][1] for rank in new))
    return _encode_ranks(new), base64.b64encode(column).decode()


def _decode_ports(data: Json, hosts: Mapping[int, str], base: Mapping[int, Address]) -> dict[int, Address]:
    ranks = _decode_ranks(data[0])
    ports = dict(zip(ranks, struct.unpack(f">{len(ranks)}H", base64.b64decode(data[1]))))
    return {rank: (host, ports[rank] if rank in ports else base[rank][1]) for rank, host in hosts.items()}
