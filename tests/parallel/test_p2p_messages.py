"""Headers: packing is invertible, differences are reported."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.errors import ProtocolError
from parallel3d.parallel.p2p_messages import HEADER_BYTES, Header, Kind, verify_header

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32]
HEADERS = st.builds(
    Header,
    generation=st.integers(0, 2**32 - 1),
    iteration=st.integers(0, 2**63),
    kind=st.sampled_from(Kind),
    micro_batch=st.integers(0, 2**32 - 1),
    stage=st.integers(0, 2**32 - 1),
    shape=st.lists(st.integers(0, 2**40), max_size=4).map(tuple),
    dtype=st.sampled_from(DTYPES),
)
HEADER = Header(generation=2, iteration=70_000, kind=Kind.GRADIENT, micro_batch=5, shape=(16, 32), dtype=torch.bfloat16)
CHANGES = [
    {"generation": 3},
    {"iteration": 70_001},
    {"kind": Kind.ACTIVATION},
    {"micro_batch": 6},
    {"stage": 3},
    {"shape": (32, 16)},
    {"shape": (16, 32, 1)},
    {"dtype": torch.float16},
]


@given(HEADERS)
def test_unpack_undoes_pack(header):
    packed = header.pack()
    assert len(packed) == HEADER_BYTES
    assert Header.unpack(packed) == header


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_of_the_tensor(dtype):
    header = dataclasses.replace(HEADER, dtype=dtype)
    assert header.num_bytes == torch.empty(16, 32, dtype=dtype).nbytes
    assert dataclasses.replace(header, shape=()).num_bytes == dtype.itemsize
    assert dataclasses.replace(header, shape=(4, 0)).num_bytes == 0


def test_strangers_are_told_by_their_first_bytes():
    with pytest.raises(ProtocolError, match="GET "):
        Header.unpack(b"GET / HTTP/1.1\r\n".ljust(HEADER_BYTES, b" "))


@pytest.mark.parametrize("at, value", [(16, 0), (16, 99), (28, 200), (32, 5)])  # kind, kind, dtype, dimensions
def test_damaged_headers_are_named(at, value):
    damaged = bytearray(HEADER.pack())
    damaged[at] = value
    with pytest.raises(ProtocolError, match="a message of kind"):
        Header.unpack(bytes(damaged))


def test_the_expected_message_passes():
    verify_header(3, Header.unpack(HEADER.pack()), HEADER)


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_every_field_is_verified(change):
    with pytest.raises(ProtocolError, match="from rank 3") as caught:
        verify_header(3, dataclasses.replace(HEADER, **change), HEADER)
    expected, got = str(caught.value).split("; got ")
    assert "gradient of micro-batch 5, iteration 70000, generation 2, (16, 32) torch.bfloat16" in expected
    assert str(next(iter(change.values()))).removeprefix("Kind.").lower()[:5] in got.lower()
