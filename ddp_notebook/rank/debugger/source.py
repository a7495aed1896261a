"""The source text of what runs on this rank, which of its lines have code, and functions by name.

A function is found by the name that its user has for it, also before its module is imported.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import importlib.util
import inspect
import linecache
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from ddp_notebook import syntax
from ddp_notebook.model import Frame
from ddp_notebook.rank.inspect.frames import IsUsers, code_in, file_shown, own_name
from ddp_notebook.rank.inspect.objects import objects_of

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
    lines = lines_of(code.co_filename)
    source = lines[line - 1].strip()[:160] if 0 < line <= len(lines) else ""
    return Frame(file_shown(code.co_filename), line, own_name(code), source)


def parsed(source: str) -> ast.AST:
    """Return its tree; an empty one where it is no Python."""
    try:
        tree: ast.AST = syntax.parse(source)
    except SyntaxError:
        return ast.Module([], [])
    return tree


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
    tree = syntax.parse(condition.strip(), mode="eval")
    is_plain = "__" not in condition and all(isinstance(node, _PLAIN) for node in ast.walk(tree))
    return ast.unparse(tree) if is_plain else ""


# -- functions by name -------------------------------------------------------------------

_DEEPEST = 20
"""So many wrappers around a function, and modules that hand a name on, are looked through."""
_static = inspect.getattr_static


def named(name: str, names: Mapping[str, Any], is_users: IsUsers) -> Any:
    """Return what the user calls so: of the notebook's `names`, a module's, a function's own.

    None where there is nothing of that name.
    """
    parts = name.split(".")
    if parts[0] in names:
        return functools.reduce(_member, parts[1:], names[parts[0]])
    for end in range(len(parts) - 1, 0, -1):
        module = sys.modules.get(".".join(parts[:end]))
        if module is not None:
            return functools.reduce(_member, parts[end:], module)
    # A function of the user's own, or one that such a function defines when it is called.
    functions = objects_of(FunctionType)
    of_users = [f for f in functions if is_users(f.__code__.co_filename)]
    inner = (code for function in of_users for code in code_in(function.__code__))
    # In this order, since a name such as `forward` is that of hundreds of torch's functions.
    for found in (of_users, inner, functions):
        for value in found:
            code: CodeType = getattr(value, "__code__", value)
            if f".{code.co_qualname}".replace(".<locals>", "").endswith(f".{name}"):
                return value
    return vars(builtins).get(name)


def _member(value: Any, name: str) -> Any:
    """An attribute, a part of a model, or the code of a function that is defined in a function."""
    found = _static(value, name, None)
    if found is not None:
        return found
    parts = _static(value, "_modules", None)
    if type(parts) is dict and name in parts:
        return parts[name]
    code = code_of(value)
    inner = (each for each in (code.co_consts if code else ()) if inspect.iscode(each))
    return next((code for code in inner if code.co_name == name), None)


# -- before it is imported -----------------------------------------------------------------


def to_come(name: str) -> tuple[str, int]:
    """Return the file and first line of a function of a module that was not imported yet.

    Nothing is imported for that. Without a file where there is no such module; line 0 where it
    has no such function.
    """
    names, file = name.split("."), ""
    for _ in range(_DEEPEST):
        spec, at, where = None, 0, None
        # In a namespace package nothing can be found before that is imported.
        with contextlib.suppress(ImportError, KeyError, ValueError):
            while at < len(names) and (at == 0 or where is not None):
                found = PathFinder.find_spec(".".join(names[: at + 1]), where)
                if found is None:
                    break
                spec, at, where = found, at + 1, found.submodule_search_locations
        if spec is None or not (spec.origin or "").endswith(".py"):
            break
        file, rest = str(spec.origin), names[at:]
        tree = parsed(source_of(file))
        if line := defined_at(tree, ".".join(rest)):
            return file, line
        package = spec.name if spec.submodule_search_locations else spec.parent
        origin = _imported_from(tree, package, rest[0]) if rest else ""
        if not origin:
            break
        names = [*origin.split("."), *rest[1:]]  # the module only hands it on
    return file, 0


def _imported_from(tree: ast.AST, package: str | None, name: str) -> str:
    """The full name of what a module of `package` imports as `name`; empty where it does not."""
    imports = (node for node in ast.iter_child_nodes(tree) if isinstance(node, ast.ImportFrom))
    for node in imports:
        for alias in node.names:
            if (alias.asname or alias.name) == name:
                module = "." * node.level + (node.module or "")
                with contextlib.suppress(ImportError):  # beyond the outermost package
                    return f"{importlib.util.resolve_name(module, package)}.{alias.name}"
    return ""


def defined_at(tree: ast.AST, name: str) -> int:
    """Return the first line of the function of that name in `tree`; 0 without such a function.

    Of a class: of its `forward`, or else of its `__init__`.
    """
    node: Any = tree
    for part in name.split(".") if name else ():
        node = _definition(node, part)
    if isinstance(node, ast.ClassDef):
        node = _definition(node, "forward") or _definition(node, "__init__")
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return 0
    statements = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return (statements or node.body)[0].lineno


def _definition(node: Any, name: str) -> Any:
    body = getattr(node, "body", ())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return next((each for each in body if isinstance(each, kinds) and each.name == name), None)


# -- its code ------------------------------------------------------------------------------


def code_of(value: Any) -> CodeType | None:
    """Return what runs when `value` is called, or a model goes forward; None: no Python does.

    Nothing of the user's is run to find that: attributes are read past their classes.
    """
    for _ in range(_DEEPEST):
        if isinstance(value, CodeType):
            return value
        inner = _wrapped(value)
        if inner is not None:
            value = inner
        elif isinstance(value, FunctionType):
            return value.__code__
        elif inspect.isclass(value):
            value = _static(value, "forward", None) or _static(value, "__init__", None)
        else:
            value = _static(type(value), "forward", None) or _static(type(value), "__call__", None)
    return None


def _wrapped(value: Any) -> Any:
    """The function or the model that another one, a method or a property is around; or None."""
    if isinstance(value, property):
        return value.fget
    if isinstance(value, functools.partial | functools.cached_property):
        return value.func
    if isinstance(value, staticmethod | classmethod | MethodType):
        return value.__func__
    parts = _static(value, "_modules", None)
    if type(parts) is dict and type(value).__module__.startswith("torch."):
        return parts.get("module") or parts.get("_orig_mod")  # DDP's, and torch.compile's
    wrapped = _static(value, "__wrapped__", None)
    if wrapped or type(value) is not FunctionType or value.__name__ == value.__code__.co_name:
        return wrapped
    # A nameless wrapper that was renamed for what it calls, as torch's `F.max_pool2d` is. Other
    # functions have the same wrapper: a line of it is none of this function's own.
    for cell in value.__closure__ or ():
        inner = cell.cell_contents if cell != CellType() else None
        if type(inner) is FunctionType and inner.__name__.strip("_") == value.__name__:
            return inner
    return None


def first_line(code: CodeType) -> int:
    """Return the first line of a function's body; of one that is a single line, that."""
    lines = [line for _, _, line in code.co_lines() if line]
    return next((line for line in lines if line > lines[0]), lines[0])
