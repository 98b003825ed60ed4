"""Calls that may block for ever.

In a file that uses what blocks by itself (threads, sockets, processes, torch.distributed), a call that may block has a
timeout, or stands in a function with an abort token, or a comment on one of its lines gives the reason why it ends:
`# bounded: <why>`. Other files wait only for objects of those: a group's work has its group's token.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.support.imports import imports, is_in

BLOCKING_MODULES: tuple[str, ...] = (
    "asyncio",
    "concurrent",
    "fcntl",
    "multiprocessing",
    "os",  # waitpid
    "queue",
    "select",
    "selectors",
    "socket",
    "subprocess",
    "threading",
    "torch.distributed",
)

NUM_ARGUMENTS_WITH_TIMEOUT: dict[str, int] = {
    "wait": 1,
    "join": 1,  # str.join has its argument, too
    "result": 1,
    "communicate": 2,
    "get": 1,  # dict.get has an argument; queue.get(True) is not written here
    "acquire": 1,
    "wait_for": 2,
    "recv": 99,
    "recv_into": 99,
    "recvfrom": 99,
    "accept": 99,
    "select": 1,  # selectors; select.select has three lists before its timeout, seen below
}
"""Calls that may block, and the number of positional arguments from which on they have a timeout (99: never)."""


def check_waits(path: str, source: str) -> Iterator[str]:
    """Calls under parallel3d/ that may block for ever."""
    if not path.startswith("parallel3d/") or not any(
        is_in(name, BLOCKING_MODULES) for _, name in imports(path, source)
    ):
        return
    tree, lines = ast.parse(source), source.splitlines()
    for call, function in calls_with_function(tree):
        said = any(re.search(r"# bounded: \S", line) for line in lines[call.lineno - 1 : call.end_lineno])
        if may_block(call) and not said and not (function and has_token(function)):
            yield f"{path}:{call.lineno}: {ast.unparse(call)} without timeout, abort token or '# bounded: <why>'"


def may_block(call: ast.Call) -> bool:
    """True for a call of a method that waits, without a timeout."""
    if not isinstance(call.func, ast.Attribute):
        return False
    name, owner = call.func.attr, ast.unparse(call.func.value)
    if name == "put":  # of a queue: other objects called so have no queue in their name
        bounded, owner_waits = len(call.args) >= 3, "queue" in owner.lower()
    elif (owner, name) == ("select", "select"):
        bounded, owner_waits = len(call.args) >= 4, True
    elif name in ("waitpid", "flock"):
        bounded, owner_waits = bool(re.search("WNOHANG|LOCK_NB|LOCK_UN", ast.unparse(call))), True
    elif name in NUM_ARGUMENTS_WITH_TIMEOUT:
        bounded, owner_waits = len(call.args) >= NUM_ARGUMENTS_WITH_TIMEOUT[name], True
    else:
        return False
    return owner_waits and not bounded and not any(gives_end(keyword) for keyword in call.keywords)


def gives_end(keyword: ast.keyword) -> bool:
    """timeout=<not None>, block=False or blocking=False."""
    value = keyword.value.value if isinstance(keyword.value, ast.Constant) else ...
    if keyword.arg in ("timeout", "timeout_s"):
        return value is not None
    return keyword.arg in ("block", "blocking") and value is False


def calls_with_function(tree: ast.AST, function: ast.AST | None = None) -> Iterator[tuple[ast.Call, ast.AST | None]]:
    """All calls, each with the outermost function around it."""
    for node in ast.iter_child_nodes(tree):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if isinstance(node, ast.Call):
            yield node, function
        yield from calls_with_function(node, function or (node if is_function else None))


def has_token(function: ast.AST) -> bool:
    """True if an abort token is named anywhere in the function (tokens of text are not: num_tokens, token_ids)."""
    names = {
        getattr(node, field, None)
        for node in ast.walk(function)
        for field in ("arg", "id", "attr")  # parameters and keywords, names, attributes
    }
    return any(re.search(r"(^|_)token$|AbortToken$", name) for name in names if isinstance(name, str))
