"""Finds objects of the user's by name, and says where in the user's files an error was raised.

package:object      imported from a folder of PYTHONPATH, or from the current one
folder/file.py:object
name                an installed package's entry point, of a group like parallel3d.callbacks
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
import traceback
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import entry_points
from inspect import getfile, getsourcelines, signature, unwrap
from pathlib import Path
from types import ModuleType
from typing import Any

from parallel3d.errors import ConfigError, Parallel3dError, Problem, UserCodeError, is_out_of_memory

_OWN = str(Path(__file__).resolve().parent)
_BACKWARD_PASS = "_engine_run_backward"
"""torch's function that runs it, on the thread that asks for it."""
_REFUSALS_OF_BACKWARD = (
    "returned an incorrect number of gradients",
    "returned an invalid gradient",
    "expected Variable or None",
    "modified by an inplace operation",
    "backward through the graph a second time",
    "does not require grad and does not have a grad_fn",
)
"""In torch's messages: what a graph of the user's functions does wrong, without a line of the user's."""
FIX = "Name module:object with a module in this folder or in one of PYTHONPATH, or path/to/file.py:object"


def load_object(name: str, *, field: str, group: str | None = None) -> Any:
    """The object called `name` in the configuration's `field`; `group` is that of entry points, if it may be one.

    Raises ConfigError, with the user's file and line if the user's code has failed.
    """
    source, colon, attribute = name.rpartition(":")
    try:
        if not colon:
            return _load_entry_point(name, group)
        found: Any = _load_file(Path(source)) if source.endswith(".py") else _import(source)
        for part in attribute.split("."):
            found = getattr(found, part)
        return found
    except Exception as error:  # whatever the user's file raises
        raise ConfigError([Problem(field=field, value=name, rule=explain(error), fix=FIX)]) from error


def names_object(name: str, group: str) -> bool:
    """Whether a name that no file has can be that of an object of the user's, or is that of an entry point."""
    return (":" in name and "://" not in name) or name in _entry_points().select(group=group).names


def file_of_object(found: Any) -> Path:
    """The file with the code of a function or a class, or of an object's class."""
    code = unwrap(found)
    return Path(getfile(code if isinstance(code, type) or hasattr(code, "__code__") else type(code)))


def installed(group: str) -> list[Any]:
    """The objects that installed packages offer in a group of entry points; one that can't be imported is a warning."""
    return [found for _, found in installed_by_name(group)]


def installed_by_name(group: str) -> list[tuple[str, Any]]:
    """As `installed`, with the names of the entry points."""
    found = []
    for entry in _entry_points().select(group=group):
        try:
            found.append((entry.name, entry.load()))
        except Exception as error:  # whatever the user's file raises
            warnings.warn(f"{group}: {entry.name} = {entry.value} can't be used: {explain(error)}", stacklevel=2)
    return found


@cache
def _entry_points() -> Any:
    return entry_points()


def explain(error: BaseException, of: Any = None) -> str:
    """The user's file and line, if the error was raised below one, or those of the user's object `of`, and the
    error."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    if (place := user_line(error)) is None:
        return text if of is None else f"{_place_of(of)}{text}"
    line = f" ({place.line})" if place.line else ""
    return f"{place.filename}, line {place.lineno}, in {place.name}{line}: {text}"


def user_line(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost line of the traceback that is neither ours, nor torch's, nor Python's own; of an installed package
    only where all are."""
    places = [each for each in reversed(traceback.extract_tb(error.__traceback__)) if _is_the_users(each.filename)]
    packages = f"{sysconfig.get_paths()['purelib']}/"
    return next((each for each in places if not each.filename.startswith(packages)), places[0] if places else None)


def is_raised_by_the_user(error: BaseException) -> bool:
    """Whether the user's own code has raised it, or called something with what that refuses; not the RuntimeError of a
    part of ours that the user's code has called, such as a lost connection."""
    places = traceback.extract_tb(error.__traceback__)
    users = [index for index, place in enumerate(places) if _is_the_users(place.filename)]
    below = [place for place in places[users[-1] :] if place.name != "__torch_dispatch__"] if users else []
    below_is_ours = any(place.filename.startswith(f"{_OWN}/") for place in below)
    return bool(users) and not (below_is_ours and isinstance(error, RuntimeError | OSError))


@contextmanager
def errors_named(what: str, of: Any = None) -> Iterator[None]:
    """Names the user's file and line in an error of the user's code; it ends the run, since every rank will meet it.

    of: the user's object whose methods are called; one that takes other arguments is an error of the user's, too.
    """
    try:
        yield
    except Parallel3dError:
        raise
    except Exception as error:
        if of is not None and (method := _refused_method(error, of)):
            raise UserCodeError(f"{what}: {_place_of(method)}{type(error).__name__}: {error}") from error
        is_torchs = type(error).__module__ == "torch.utils.checkpoint" or is_out_of_memory(error)
        if is_torchs or not is_raised_by_the_user(error):
            raise  # such as what ends a recomputation early
        raise UserCodeError(f"{what}: {explain(error)}") from error


def _refused_method(error: Exception, of: Any) -> Any:
    """The method of the object that our call of it does not fit, if the error says so: it then has no line below ours.
    Methods of ours that the object inherits don't count."""
    called = str(error).partition("()")[0].rpartition(".")[2] if isinstance(error, TypeError) else ""
    last = traceback.extract_tb(error.__traceback__)[-1]
    method = getattr(type(of), called, None) if last.filename.startswith(f"{_OWN}/") else None
    is_the_calls = str(error).startswith(f"{getattr(method, '__qualname__', '')}()")
    return method if is_the_calls and callable(method) and not method.__module__.startswith("parallel3d.") else None


@contextmanager
def backward_errors_named(what: str) -> Iterator[None]:
    """Names the user's file and line in an error of the user's code below torch's backward pass; other errors of what
    is inside, such as a lost connection or a full disk, stay what they are."""
    try:
        yield
    except Parallel3dError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        start = next((index for index, each in enumerate(frames) if each.name == _BACKWARD_PASS), None)
        if start is None or is_out_of_memory(error):
            raise
        below = frames[start + 1 :]
        if _has_left_for_the_user(below) and is_raised_by_the_user(error):
            raise UserCodeError(f"{what}: {explain(error)}") from error
        if _is_torchs_refusal(error, below):
            raise UserCodeError(f"{what}: in the backward pass: {type(error).__name__}: {error}") from error
        raise


def _has_left_for_the_user(below: list[traceback.FrameSummary]) -> bool:
    """Whether the backward pass has called code of the user's, and not one of ours that has called a package."""
    first = next((index for index, each in enumerate(below) if _is_the_users(each.filename)), None)
    if first is None:
        return False
    is_by_ours = first > 0 and below[first - 1].filename.startswith(f"{_OWN}/")
    return not (is_by_ours and below[first].filename.startswith(f"{sysconfig.get_paths()['purelib']}/"))


def _is_torchs_refusal(error: Exception, below: list[traceback.FrameSummary]) -> bool:
    """Whether torch could not call the user's function (with the hook or the backward of another signature), or refuses
    the graph or the gradients; all of it happens in frames of torch's alone."""
    if any(each.filename.startswith(f"{_OWN}/") or _is_the_users(each.filename) for each in below):
        return False
    is_refused = isinstance(error, RuntimeError) and any(text in str(error) for text in _REFUSALS_OF_BACKWARD)
    return is_refused or isinstance(error, TypeError)


def check_call(function: Any, *arguments: Any, what: str, **named: Any) -> None:
    """Raises UserCodeError, with the object's file and line, if the user's object can't be called with these
    arguments."""
    if not callable(function):
        text = f"it is of type {type(function).__name__}, which can't be called"
        raise UserCodeError(f"{what}: {_place_of(function)}{text}")
    try:
        form = signature(function)
    except (TypeError, ValueError):  # of a C extension, say: the call itself shows it
        return
    try:
        form.bind(*arguments, **named)
    except TypeError as error:
        count = len(arguments) + len(named)
        given = f"{count} argument{'' if count == 1 else 's'}" if count else "no arguments"
        name = getattr(function, "__qualname__", type(function).__name__).rpartition("<locals>.")[2]
        text = f"it is called with {given}, and {name}{form} takes others ({error})"
        raise UserCodeError(f"{what}: {_place_of(function)}{text}") from error


def _place_of(found: Any) -> str:
    """The file and line where an object's code begins, before a message; empty where it has no source.

    It may parse the whole file, for which ranks that are threads disturb each other in some versions of Python.
    """
    try:
        code = unwrap(found)
        code = code if isinstance(code, type) or hasattr(code, "__code__") else type(code)
        return f"{file_of_object(found)}, line {getsourcelines(code)[1]}: "
    except (OSError, TypeError, SyntaxError, SystemError):
        return ""


def _is_the_users(file: str) -> bool:
    paths = sysconfig.get_paths()
    torch = sys.modules.get("torch")
    others = [_OWN, paths["stdlib"], *([str(Path(str(torch.__file__)).parent)] if torch else [])]
    return not file.startswith("<") and not any(file.startswith(f"{folder}/") for folder in others)


def _load_entry_point(name: str, group: str | None) -> Any:
    entries = {entry.name: entry for entry in _entry_points().select(group=group)} if group else {}
    if name not in entries:
        known = f"; installed packages offer {', '.join(sorted(entries))}" if entries else ""
        raise LookupError(f"{name!r} names no object{known}")
    return entries[name].load()


def _load_file(path: Path) -> ModuleType:
    """The module in a file, which can import its neighbours; read once in a process."""
    path = path.expanduser().resolve()
    name = f"user_file_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import(name: str) -> ModuleType:
    """Imports a module, from the current folder too, as for `python -m`."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    return importlib.import_module(name)
