"""Shell completion: `eval "$(parallel3d completion bash)"` in ~/.bashrc; zsh and fish have the same.

The printed function asks `parallel3d completion --words WORD...` at each Tab, as argcomplete's do, so it knows every
option of the installed version, the shipped configurations and the fields of the schema. Not shtab: it makes scripts
for bash, zsh and tcsh that list options alone, and go out of date with the package.
"""

from __future__ import annotations

import argparse
import glob
import json
from collections.abc import Iterator, Sequence
from typing import Any

from parallel3d.commands.main import COMMANDS
from parallel3d.commands.parsers import make_parser, parse
from parallel3d.config.shipped import SCHEMA, shipped_configs, shipped_folder

BASH = r"""_parallel3d() {
    local line=${COMP_LINE:0:COMP_POINT} words current found
    read -ra words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    current=${words[-1]}
    mapfile -t COMPREPLY < <(parallel3d completion --words "${words[@]:1}" 2> /dev/null)
    [[ ${#COMPREPLY[@]} -eq 1 && -z ${COMPREPLY[0]} ]] && COMPREPLY=()
    for found in "${COMPREPLY[@]}"; do
        [[ $found == *[=/] ]] && compopt -o nospace
    done
    if [[ $current == *=* && $COMP_WORDBREAKS == *=* ]]; then  # bash replaces only what follows the last =
        COMPREPLY=("${COMPREPLY[@]#"${current%"${current##*=}"}"}")
    fi
}
complete -o bashdefault -o default -F _parallel3d parallel3d"""

ZSH = r"""#compdef parallel3d
_parallel3d() {
    local -a found
    found=(${(f)"$(parallel3d completion --words "${(@)words[2,CURRENT]}" 2> /dev/null)"})
    if (( ${#found} )); then
        compadd -- ${found:#*[=/]}
        compadd -S '' -- ${(M)found:#*[=/]}
    else
        _files
    fi
}
compdef _parallel3d parallel3d"""

FISH = r"""function __parallel3d
    set -l words (commandline -opc) (commandline -ct)
    set -l found (parallel3d completion --words $words[2..-1] 2> /dev/null | string match -r '.+')
    if count $found > /dev/null
        printf '%s\n' $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c parallel3d -f -a '(__parallel3d)'"""

SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def main(arguments: list[str]) -> int:
    print(SCRIPTS[parse("completion", arguments).shell])
    return 0


def complete(words: Sequence[str]) -> list[str]:
    """What may stand in place of the last of `words`, which follow `parallel3d`; empty: the shell offers files."""
    *before, current = words
    if not before:
        return matching([*COMMANDS, "--help", "--version"], current)
    if before[0] not in COMMANDS:
        return []
    parser = make_parser(before[0])
    for word in before[1:]:
        if (commands := subcommands(parser)) and word in commands:
            parser = commands[word]
    option = parser._option_string_actions.get(before[-1])
    if option is not None and option.nargs != 0:
        return matching(values_of(option, current), current)
    if current.startswith("-"):
        name, equals, value = current.partition("=")
        if equals and (option := parser._option_string_actions.get(name)) is not None:
            return [f"{name}={found}" for found in matching(values_of(option, value), value)]
        return matching(parser._option_string_actions, current)
    positionals = parser._get_positional_actions()
    return matching((value for action in positionals for value in values_of(action, current)), current)


def matching(candidates: Iterator[str] | Sequence[str] | dict[str, Any], beginning: str) -> list[str]:
    return [candidate for candidate in candidates if candidate.startswith(beginning)]


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = (action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return next(found, {})


def values_of(action: argparse.Action, current: str) -> list[str]:
    """The values that an option or argument may have, as far as they are known."""
    kind = getattr(action, "complete", None)
    if kind == "configs":
        files = sorted(glob.glob(f"{glob.escape(current)}*.json"))
        folders = [f"{folder}" for folder in sorted(glob.glob(f"{glob.escape(current)}*/"))]
        return [*shipped_configs(), *files, *folders]
    if kind == "shipped":
        return [*shipped_configs(), "schema"]
    if kind == "fields":
        return list(overrides(json.loads((shipped_folder() / SCHEMA).read_text(encoding="utf-8")), current))
    return list(map(str, action.choices or ()))


# --- fields of the configuration --------------------------------------------------------------------------------------


def overrides(schema: dict[str, Any], current: str) -> Iterator[str]:
    """`section.field=`, and `section.field=value` once that is typed, where the schema lists values."""
    for name, node in fields(schema, schema, ""):
        if current.startswith(f"{name}="):
            yield from (f"{name}={value}" for value in listed_values(node))
        elif "=" not in current:
            yield f"{name}="


def fields(schema: dict[str, Any], node: dict[str, Any], prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field that is not itself a section, with its dots, and its node of the schema."""
    for name, found in node["properties"].items():
        section = section_of(schema, found)
        if section is not None:
            yield from fields(schema, section, f"{prefix}{name}.")
        elif prefix:
            yield prefix + name, found


def section_of(schema: dict[str, Any], node: dict[str, Any]) -> dict[str, Any] | None:
    """The section that a field is, or may be where null stands for none."""
    for each in (node, *node.get("anyOf", ())):
        if "$ref" in each:
            target: dict[str, Any] = schema["$defs"][each["$ref"].rpartition("/")[2]]
            return target if "properties" in target else None
    return None


def listed_values(node: dict[str, Any]) -> list[str]:
    """The values of an enumeration or boolean."""
    found: list[str] = []
    for each in (node, *node.get("anyOf", ())):
        found += [str(value) for value in each.get("enum", ())]
        found += ["true", "false"] if each.get("type") == "boolean" else []
        found += ["null"] if each.get("type") == "null" else []
        found += [str(each["const"])] if "const" in each else []
    return found
