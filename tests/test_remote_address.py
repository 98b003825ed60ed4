"""What of an address may be kept and shown: no user, and no query but one without secrets."""

from __future__ import annotations

import pytest

from parallel3d.errors import Problem
from parallel3d.remote_address import broken_query_rule, redacted, variables_of, with_variables, without_secrets


@pytest.mark.parametrize(
    "address",
    [
        "https://host/a.txt",
        "https://host/a.txt?download=true",
        "https://host/a.txt?version=1.2&revision=refs/pr/1",
        "https://host/a.txt?${SIGNATURE}",
        "https://host/a.txt?sig=${A_1}&raw=1&${B}",
        "s3://bucket/a/*/part-??.txt",
        "s3://bucket/day=1?/part-*",
        "s3://bucket/a.txt?versionId=abc",
        "s3://bucket/a#1.txt",
    ],
)
def test_what_may_be_kept(address: str) -> None:
    assert broken_query_rule(address) is None
    assert without_secrets(f"data.sources=['{address}', 1]") == f"data.sources=['{address}', 1]"


@pytest.mark.parametrize(
    "address",
    [
        "https://host/a.txt?X-Amz-Signature=SECRET",
        "https://host/a.txt?SECRET",
        "https://host/a.txt?download=1&sig=SECRET",
        "https://host/a.txt?download=1;sig=SECRET",
        "https://host/a.txt?download=1#SECRET",
        "https://host/a.txt#SECRET",
        "https://host/a.txt?sig=SECRET${NAME}",
        "https://host/a.txt?${NAME}SECRET",
        "s3://bucket/part-?.txt?sig=SECRET",
        "simplecache::https://host/a.txt?SECRET",
    ],
)
def test_what_may_not_be_kept(address: str) -> None:
    problem = broken_query_rule(address)
    assert problem and "must not have a query" in problem
    assert "SECRET" not in redacted(address)
    text = without_secrets(f"data.sources=['{address}', 1]")
    assert "SECRET" not in text and text.endswith("?...', 1]")


def test_what_a_shell_has_replaced() -> None:
    assert "${NAME} in double quotes" in str(broken_query_rule("https://host/a.txt?"))


@pytest.mark.parametrize("address", ["https://me:SECRET@host/a", "s3://SECRET@b/a", "zip://a::https://me:SECRET@h/a"])
def test_users_are_left_out(address: str) -> None:
    assert "SECRET" not in redacted(address) + without_secrets(f"--to {address}")
    assert without_secrets(f"--to {address}").startswith("--to ")


def test_a_problem_has_no_secret() -> None:
    address = "https://me:SECRET@host/a.txt?SECRET"
    problem = Problem(field="data.sources", value=[address], rule=f"can't be combined with {address}", fix="Remove it")
    text = str(problem)
    assert "SECRET" not in text and text.count("https://...@host/a.txt?...") == 2


def test_a_revision_in_a_path_is_not_a_user() -> None:
    assert redacted("hf://datasets/a/b@main/c.txt") == "hf://datasets/a/b@main/c.txt"


def test_variables_are_filled_in() -> None:
    address = "https://host/${PATH}/a.txt?raw=1&sig=${A}&${B}"
    assert variables_of(address) == ["A", "B"]
    filled = with_variables(address, {"A": "x%2Fy", "B": "?sv=1&se=2\n", "PATH": "no"})
    assert filled == "https://host/${PATH}/a.txt?raw=1&sig=x%2Fy&sv=1&se=2"
    assert with_variables("s3://bucket/part-?.txt", {}) == "s3://bucket/part-?.txt"
