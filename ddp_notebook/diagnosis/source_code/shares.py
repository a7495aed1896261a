"""Data that the code divides among the ranks before a DistributedSampler divides it once more."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from ddp_notebook.diagnosis.source_code.conditions import last_name
from ddp_notebook.diagnosis.source_code.shared_names import SharedNames, given_in, names_in
from ddp_notebook.diagnosis.source_code.sources import Sources

_OF_RANK = frozenset({"rank", "get_rank", "RANK", "global_rank"})


def divided_before(sources: Sources, files: Iterable[str]) -> str:
    """The slice or range by which each DistributedSampler's data set has a rank's part alone.

    ``ids[rank::world_size]``, where the data set is made or in its class. Empty where it is not
    so for one of the samplers.
    """
    trees = sources.in_use(files)
    names, nodes = SharedNames(trees), [node for tree in trees for node in ast.walk(tree)]
    found = [_part(names, nodes, given) for given in _given_to_samplers(nodes)]
    return found[0] if found and all(found) else ""


def _given_to_samplers(nodes: Iterable[ast.AST]) -> Iterator[ast.expr]:
    for node in nodes:
        if isinstance(node, ast.Call) and last_name(node.func) == "DistributedSampler":
            named = (keyword.value for keyword in node.keywords if keyword.arg == "dataset")
            yield from (*node.args[:1], *named)


def _part(names: SharedNames, nodes: list[ast.AST], given: ast.expr) -> str:
    """How the data set that a sampler is given is a part; empty where it is not, or may not be."""
    name = last_name(given)
    values = [value for node in nodes for of, value in given_in(node) if name and of == name]
    found = [_in_value(names, nodes, value) for value in values or [given]]
    return found[0] if all(found) else ""


def _in_value(names: SharedNames, nodes: list[ast.AST], value: ast.AST) -> str:
    own = next(_strides(names, value), "")
    if own or not isinstance(value, ast.Call):
        return own
    given = [*value.args, *(keyword.value for keyword in value.keywords)]
    if not any(map(names.is_world_size, given)):
        return ""
    classes = (n for n in nodes if isinstance(n, ast.ClassDef) and n.name == last_name(value.func))
    return next((text for each in classes for text in _strides(None, each)), "")


def _strides(names: SharedNames | None, code: ast.AST) -> Iterator[str]:
    """``x[rank::world_size]`` and ``range(rank, n, world_size)``; without `names`, of arguments."""
    for node, first, step in _with_steps(code):
        plain = all(isinstance(each, ast.Name | ast.Attribute | ast.Call) for each in (first, step))
        counts = names.is_world_size(step) if names is not None else not isinstance(step, ast.Call)
        if plain and counts and _is_rank(first) and not _is_of_node(step):
            yield ast.unparse(node)


def _with_steps(code: ast.AST) -> Iterator[tuple[ast.AST, ast.expr, ast.expr]]:
    for node in _always_reached(code):
        match node:
            case ast.Slice(lower=ast.expr() as first, step=ast.expr() as step):
                yield node, first, step
            case ast.Call(func=ast.Name(id="range"), args=[first, _, step]):
                yield node, first, step


def _always_reached(code: ast.AST) -> Iterator[ast.AST]:
    """The nodes of code, without those under a condition that may be false.

    One on the world size is true among several ranks.
    """
    match code:
        case ast.If(test=test) | ast.IfExp(test=test) if not _on_world_size(test):
            return
    yield code
    for child in ast.iter_child_nodes(code):
        yield from _always_reached(child)


def _on_world_size(test: ast.expr) -> bool:
    return any("world" in name.lower() for name in names_in(test))


def _is_rank(node: ast.AST) -> bool:
    return not _OF_RANK.isdisjoint(names_in(node)) and not _is_of_node(node)


def _is_of_node(node: ast.AST) -> bool:
    return any("node" in name or "local" in name or "worker" in name for name in names_in(node))
