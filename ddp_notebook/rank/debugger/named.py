"""The code of a function, by the name that its user has for it, also before it is imported."""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from ddp_notebook.rank.inspect.frames import IsUsers, code_in
from ddp_notebook.rank.variables.objects import objects_of

_DEEPEST = 20
"""So many wrappers around a function are looked through."""


def named(name: str, names: Mapping[str, Any], is_users: IsUsers) -> Any:
    """What the user calls so: of the notebook's `names`, a module's, or a function's own."""
    first, *rest = name.split(".")
    if first in names:
        return _attribute(names[first], rest)
    for end in range(len(name.split(".")) - 1, 0, -1):
        module = sys.modules.get(".".join(name.split(".")[:end]))
        if module is not None:
            return _attribute(module, name.split(".")[end:])
    functions = [
        each for each in objects_of(FunctionType) if _ends(each.__code__.co_qualname, name)
    ]
    users = [function for function in functions if is_users(function.__code__.co_filename)]
    inner = None if users else _in_a_function(name, is_users)
    return next(iter(users), inner) or next(iter(functions), vars(builtins).get(name))


def _in_a_function(name: str, is_users: IsUsers) -> CodeType | None:
    """The code of a function that one of the user's defines when it is called."""
    codes = [each.__code__ for each in objects_of(FunctionType)]
    inner = (inner for code in codes if is_users(code.co_filename) for inner in code_in(code))
    return next((code for code in inner if _ends(code.co_qualname, name)), None)


def _ends(qualified: str, name: str) -> bool:
    qualified = qualified.replace(".<locals>", "")
    return qualified == name or qualified.endswith(f".{name}")


def _attribute(value: Any, names: Iterable[str]) -> Any:
    for name in names:
        value = _member(value, name)
    return value


def _member(value: Any, name: str) -> Any:
    """An attribute, a part of a model, or the code of a function that is defined in a function."""
    found = inspect.getattr_static(value, name, None)
    if found is not None:
        return found
    parts = inspect.getattr_static(value, "_modules", None)
    if type(parts) is dict and name in parts:
        return parts[name]
    code = code_of(value)
    inner = (each for each in (code.co_consts if code else ()) if inspect.iscode(each))
    return next((code for code in inner if code.co_name == name), None)


def to_come(name: str, source_of: Callable[[str], str]) -> tuple[str, int]:
    """The file and first line of a function of a module that can be imported, and was not.

    Nothing is imported for that. Without a file where there is no such module; line 0 where it
    has no such function.
    """
    names, file = name.split("."), ""
    for _ in range(_DEEPEST):
        spec, rest = _spec(names)
        if spec is None or not (spec.origin or "").endswith(".py"):
            break
        file = str(spec.origin)
        tree = parsed(source_of(file))
        if line := defined_at(tree, ".".join(rest)):
            return file, line
        origin = _imported_from(tree, spec, *rest[:1])
        if not origin:
            break
        names = [*origin, *rest[1:]]  # the module only hands it on
    return file, 0


def parsed(source: str) -> ast.AST:
    """Its tree; an empty one where it is no Python."""
    try:
        return ast.parse(source)
    except SyntaxError:
        return ast.Module([], [])


def _spec(names: Sequence[str]) -> tuple[ModuleSpec | None, Sequence[str]]:
    """The innermost module that a name begins with, and the rest of the name."""
    spec, at, where = None, 0, None
    # In a namespace package nothing can be found before that is imported.
    with contextlib.suppress(ImportError, KeyError, ValueError):
        while at < len(names) and (at == 0 or where is not None):
            found = PathFinder.find_spec(".".join(names[: at + 1]), where)
            if found is None:
                break
            spec, at, where = found, at + 1, found.submodule_search_locations
    return spec, names[at:]


def _imported_from(tree: ast.AST, spec: ModuleSpec, name: str = "") -> Sequence[str]:
    """The full name of what a module imports under `name`; nothing where it does not."""
    imports = [node for node in ast.iter_child_nodes(tree) if isinstance(node, ast.ImportFrom)]
    named = ((node, alias) for node in imports for alias in node.names)
    for node, alias in named:
        if (alias.asname or alias.name) == name:
            module = node.module.split(".") if node.module else []
            return (*_above(spec, node.level), *module, alias.name)
    return ()


def _above(spec: ModuleSpec, level: int) -> Sequence[str]:
    """The names of the package from which a module imports with so many dots."""
    package = spec.name if spec.submodule_search_locations else spec.parent or ""
    above = package.split(".")
    return above[: len(above) - level + 1] if level else ()


def defined_at(tree: ast.AST, name: str) -> int:
    """The first line of the function of that name in `tree`; 0 where it is not defined there.

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


def code_of(value: Any) -> CodeType | None:
    """What runs when `value` is called, or a model goes forward; None where it is not Python."""
    for _ in range(_DEEPEST):
        if isinstance(value, CodeType):
            return value
        inner = _wrapped(value)
        if inner is not None:
            value = inner
        elif isinstance(value, FunctionType):
            return value.__code__
        elif inspect.isclass(value):
            static = inspect.getattr_static
            value = static(value, "forward", None) or static(value, "__init__", None)
        else:
            static, kind = inspect.getattr_static, type(value)
            value = static(kind, "forward", None) or static(kind, "__call__", None)
    return None


def _wrapped(value: Any) -> Any:
    """The function or the model that another one, a method or a property is around; or None."""
    if isinstance(value, property):
        return value.fget
    if isinstance(value, functools.partial | functools.cached_property):
        return value.func
    if isinstance(value, staticmethod | classmethod | MethodType):
        return value.__func__
    parts = inspect.getattr_static(value, "_modules", None)
    if type(parts) is dict and type(value).__module__.startswith("torch."):
        return parts.get("module") or parts.get("_orig_mod")  # DDP's, and torch.compile's
    return inspect.getattr_static(value, "__wrapped__", None) or _renamed_for(value)


def _renamed_for(value: Any) -> Any:
    """The function that a nameless wrapper was renamed for, as torch's `F.max_pool2d` is.

    Other functions have the same wrapper: a line of it is none of this function's own.
    """
    if type(value) is not FunctionType or value.__name__ == value.__code__.co_name:
        return None
    cells = (each.cell_contents for each in value.__closure__ or () if each != CellType())
    inner = (cell for cell in cells if type(cell) is FunctionType)
    return next(
        (function for function in inner if function.__name__.strip("_") == value.__name__), None
    )


def first_line(code: CodeType) -> int:
    """The first line of a function's body; of one that is a single line, that."""
    lines = [line for _, _, line in code.co_lines() if line]
    return next((line for line in lines if line > lines[0]), lines[0])
