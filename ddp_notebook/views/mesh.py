"""The mesh and what ranks hold of each parameter: a grid and a table, as text and as HTML."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from html import escape

from ddp_notebook.model import counted, format_bytes, format_ranks, name_ranks
from ddp_notebook.model.ddp import MeshLayout, ModelLayout, Placed
from ddp_notebook.views import markup
from ddp_notebook.views.markup import view
from ddp_notebook.views.table import WIDTH, Cell, Column, Row, Table, indented

_MOST_LINES = 32
_MOST_ROWS = 60
_COLUMNS = (
    Column("parameter", widest=30, always=True, names_row=True),
    Column("tensor", widest=22),
    Column("ranks", widest=12, rank_set=True),
    Column("placement", fills=True, breaks=True),
    Column("bytes on a rank", widest=17, rank_set=True),
    Column("gathered in: by", widest=21),
)
_CELL = f"padding: 4px 10px; border: 1px solid rgba({markup.IDLE}, 0.35); text-align: center"
_BAR = f"height: 5px; margin-top: 2px; background: rgb({markup.BUSY})"


def text(layout: MeshLayout) -> str:
    """The mesh as a grid, then a table for each model."""
    parts = [indented(_title(layout), "")]
    lines = list(_lines(layout))
    if lines:
        width = max(len(label) for label, _ in lines)
        cell = max((len(cell) for _, cells in lines for cell in cells), default=0)
        parts.append(
            "\n".join(
                f"  {label.ljust(width)}  {'  '.join(c.ljust(cell) for c in cells)}".rstrip()
                for label, cells in lines
            )
        )
    for model in layout.models:
        parts += [indented(_about(model), ""), _table(model).text()]
    parts += [indented(note, "note: ") for note in layout.notes]
    return "\n\n".join(parts)


def html(layout: MeshLayout) -> str:
    """The same, the grid with a bar for what each rank holds; every value escaped."""
    title = f'<div style="font-weight: 600; margin: 0 0 6px">{markup.words(_title(layout))}</div>'
    # The grid is a table; where each rank has a cell of its own, with what it holds.
    most = max(layout.bytes.values(), default=0)
    rows = ""
    for label, cells in _lines(layout):
        rows += f'<tr><th style="{_CELL}">{escape(label)}</th>'
        for cell in cells:
            # In a mesh that is wide a cell names many ranks, and has no bar.
            rank = re.fullmatch(r"rank (\d+)", cell)
            size = layout.bytes.get(int(rank[1])) if rank else None
            bar = ""
            if size is not None and most:
                bar = (
                    f'<div style="{markup.MUTED}">{format_bytes(size)}</div>'
                    f'<div style="{_BAR}; width: {100 * size // most}%"></div>'
                )
            rows += f'<td style="{_CELL}">{escape(cell)}{bar}</td>'
        rows += "</tr>"
    style = "border-collapse: collapse; color: inherit; margin: 4px 0"
    parts = [title, f'<table style="{style}">{rows}</table>' if rows else ""]
    for model in layout.models:
        parts.append(f'<div style="margin: 10px 0 4px">{markup.words(_about(model))}</div>')
        parts.append(_table(model).html())
    parts += [f"<div>note: {markup.words(note)}</div>" for note in layout.notes]
    return view(parts)


def _title(layout: MeshLayout) -> str:
    ranks = f"{layout.world_size} ranks"
    if not layout.dimensions:
        return f"No mesh; {ranks}."
    shape = " x ".join(f"{name}[{size}]" for name, size in layout.dimensions)
    sizes = layout.bytes.values()
    least, most = format_bytes(min(sizes, default=0)), format_bytes(max(sizes, default=0))
    holds = f"{most} of parameters" if least == most else f"{least} to {most} of parameters"
    holds = holds if any(sizes) else "no parameters"
    return f"Mesh {shape}, {ranks}. Each rank holds {holds}."


def _lines(layout: MeshLayout) -> Iterator[tuple[str, list[str]]]:
    """The lines of the grid: the last dimension across, the others down."""
    if not layout.dimensions:
        return
    *outer, (last, size) = layout.dimensions
    rows: dict[tuple[int, ...], list[int]] = {}
    for rank, place in sorted(layout.coordinates.items(), key=lambda item: item[1]):
        rows.setdefault(place[:-1], []).append(rank)
    wide = size > 6  # then a line names its ranks together
    if not wide:
        yield "", [f"{last}={at}" for at in range(size)]
    for place, ranks in list(rows.items())[:_MOST_LINES]:
        label = ", ".join(f"{name}={at}" for (name, _), at in zip(outer, place, strict=True))
        together = f"{last}=0-{size - 1}: {name_ranks(ranks)}"
        yield label, [together] if wide else [f"rank {rank}" for rank in ranks]
    if len(rows) > _MOST_LINES:
        yield f"and {len(rows) - _MOST_LINES} more lines", []


def _about(model: ModelLayout) -> str:
    whole = {parameter.name: parameter.whole_bytes for parameter in model.parameters}
    count, size = counted(len(whole), "parameter"), format_bytes(sum(whole.values()))
    return f"{model.name}: {count}, {size} in all."


def _table(model: ModelLayout) -> Table:
    """A row for parameters that are alike but for one number in their names."""
    every = {rank for parameter in model.parameters for rank in parameter.ranks}
    groups: dict[tuple[object, ...], list[Placed]] = {}
    for parameter in model.parameters:
        # `layers.0.weight` and `layers.1.weight` fold; `a.0.b.0` and `a.1.b.1` do not, as only the
        # first number may differ.
        numbers = re.findall(r"\d+", parameter.name)
        key = re.sub(r"\d+", "#", parameter.name), *numbers[1:], replace(parameter, name="")
        groups.setdefault(key, []).append(parameter)
    rows = []
    for group in list(groups.values())[:_MOST_ROWS]:
        name = group[0].name
        if len(group) > 1:  # ``layers.0-3.weight``
            firsts = (int(m[0]) for each in group if (m := re.search(r"\d+", each.name)))
            name = re.sub(r"\d+", format_ranks(firsts), name, count=1)
        rows.append(_row(name, group[0], every))
    if len(groups) > _MOST_ROWS:
        more = f"and {len(groups) - _MOST_ROWS} more: --json"
        rows.append(Row([Cell(more), *[Cell("")] * (len(_COLUMNS) - 1)]))
    return Table(_COLUMNS, rows, WIDTH)


def _row(name: str, each: Placed, every: set[int]) -> Row:
    gathered = ", ".join(each.gathers) + (f": {each.over}" if each.gathers and each.over else "")
    sizes = "; ".join(
        f"{format_bytes(size)}" + (f" ({name_ranks(ranks)})" if len(each.bytes) > 1 else "")
        for ranks, size in each.bytes
    )
    cells = (
        name,
        f"{each.dtype} {list(each.shape)}",
        "" if set(each.ranks) == every else format_ranks(each.ranks),
        each.placement,
        sizes,
        gathered or "never",
    )
    return Row([Cell(cell) for cell in cells])
