"""The source text of what runs on this rank, and which of its lines have code."""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
from collections.abc import Sequence
from types import CodeType

from ddp_notebook.model import Frame
from ddp_notebook.rank.inspect.frames import CELL_NAME

_PLAIN = (
    *(ast.Expression, ast.Name, ast.Constant, ast.Attribute, ast.Subscript, ast.Compare),
    *(ast.BoolOp, ast.UnaryOp, ast.BinOp),
    *(ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
)
"""The nodes of an expression that neither calls anything nor makes variables."""


def source_of(file: str) -> str:
    """Return the text of a file or a cell; the cell's first line, its magic, left empty."""
    return "".join(lines_of(file))


def lines_of(file: str) -> list[str]:
    """Return the same as lines, each with its end."""
    if file.startswith("<"):
        lines = linecache.getlines(file)
        return ["\n", *lines[1:]] if lines and lines[0].lstrip().startswith("%%") else lines
    linecache.checkcache(file)
    lines = linecache.getlines(file)
    if not lines:  # in an archive: its module's loader has the text
        modules = (vars(each) for each in list(sys.modules.values()) if inspect.ismodule(each))
        module = next((each for each in modules if each.get("__file__") == file), None)
        lines = linecache.getlines(file, module)
    return lines


def shown(code: CodeType, line: int) -> Frame:
    """Return where `code` is at `line`, as it is shown: ``cell 3``, ``Net.forward``."""
    cell = CELL_NAME.fullmatch(code.co_filename)
    lines = lines_of(code.co_filename)
    source = lines[line - 1].strip()[:160] if 0 < line <= len(lines) else ""
    file = f"cell {cell[1]}" if cell else code.co_filename
    return Frame(file, line, code.co_qualname.rpartition(".<locals>.")[2], source)


def parsed(source: str) -> ast.AST:
    """Return its tree; an empty one where it is no Python."""
    try:
        return ast.parse(source)
    except SyntaxError:
        return ast.Module([], [])


def line_with_code(tree: ast.AST, wanted: int) -> int | None:
    """Return the line to stop at for a `wanted` one: of its statement, or of the next one."""
    spans, docstrings = [], []
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not isinstance(node, ast.Global | ast.Nonlocal):
            spans.append(_span(node))
        elif isinstance(node, ast.Lambda):
            spans.append(_span(node.body))
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            docstrings.append(_span(node.body[0]))
    spans = [span for span in spans if span not in docstrings]
    around = [first for first, last in spans if first <= wanted <= last]
    return max(around, default=min((first for first, _ in spans if first > wanted), default=None))


def _span(node: ast.stmt | ast.expr) -> tuple[int, int]:
    """Return the first and last line of a node that are its own: of a function, its head."""
    decorators: Sequence[ast.expr] = getattr(node, "decorator_list", ())
    first = min([node.lineno, *(each.lineno for each in decorators)])
    body = getattr(node, "body", None)
    if isinstance(body, list) and body:
        return first, max(node.lineno, body[0].lineno - 1)
    return first, node.end_lineno or first


def plain(condition: str) -> str:
    """Return the condition in one line; empty where it calls something, or makes variables."""
    tree = ast.parse(condition.strip(), mode="eval")
    is_plain = "__" not in condition and all(isinstance(node, _PLAIN) for node in ast.walk(tree))
    return ast.unparse(tree) if is_plain else ""
