"""Draws the routes of micro-batches as a table. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from parallel3d.pipeline.request import Routes

MAX_WIDTH = 120


def draw_route_map(routes: Routes, replicas: Sequence[Sequence[int]], first_replicas: Sequence[Sequence[int]]) -> str:
    """A row for each stage, a column for each replica that it has or began with; "" when it would not fit on a screen.

    A micro-batch that is not at home is marked with a +. `replicas` are the live ones of each stage::

                  replica 0   replica 1   replica 2
        stage 0   0 3 6       1 4 7       2 5 8
        stage 1   0 3 6 +1 +7 lost        2 5 8 +4
    """
    homes = sorted({replica for ids in replicas for replica in ids})
    cells: dict[tuple[int, int], list[str]] = defaultdict(list)
    for micro_batch, route in enumerate(routes):
        home = homes[micro_batch % len(homes)]
        for stage, replica in enumerate(route):
            cells[stage, replica].append(f"{micro_batch}" if replica == home else f"+{micro_batch}")
    columns = sorted({replica for ids in (*first_replicas, *replicas) for replica in ids})
    rows = [["", *(f"replica {replica}" for replica in columns)]]
    for stage, ids in enumerate(first_replicas):
        row = [f"stage {stage}"]
        for replica in columns:
            own = sorted(cells[stage, replica], key=lambda text: text.startswith("+"))
            is_live = replica in replicas[stage]
            row.append(" ".join(own) or "idle" if is_live else "lost" if replica in ids else "")
        rows.append(row)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    if sum(widths) + 3 * len(widths) > MAX_WIDTH:
        return ""
    return "\n".join("   ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in rows)
