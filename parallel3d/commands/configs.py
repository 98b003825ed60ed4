"""Lists the configurations that come with the package, or prints one: `parallel3d configs [NAME | schema]`.

`parallel3d configs quickstart > my_run.json` is a beginning of one's own. Exit codes: 0 done, 2 unknown name.
"""

from __future__ import annotations

import sys

from parallel3d.commands.parsers import parse
from parallel3d.config.json_file import read_json
from parallel3d.config.shipped import SCHEMA, shipped_configs, shipped_folder
from parallel3d.errors import UserError


def main(arguments: list[str]) -> int:
    name: str | None = parse("configs", arguments).name
    shipped = shipped_configs()
    if name is None:
        width = max(map(len, shipped))
        for known, file in shipped.items():
            model = read_json(file).get("model", {})
            sizes = f"{model.get('num_hidden_layers', '?')} layers of {model.get('hidden_size', '?')}"
            print(f"{known:<{width}}  {model.get('architecture', 'llama')}, {sizes}")
        return 0
    path = shipped_folder() / SCHEMA if name in ("schema", SCHEMA) else shipped.get(name.removesuffix(".json"))
    if path is None:
        print(f"parallel3d configs {name}: unknown; there are {', '.join(shipped)} and schema", file=sys.stderr)
        return UserError.exit_code
    print(path.read_text(encoding="utf-8"), end="")
    return 0
