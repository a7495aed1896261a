"""Random numbers that are the same on all ranks and must differ, or differ and must not.

That the numbers are the same proves nothing: ranks may draw one order of all samples, and take
their own parts of it. So the code must say as well that they are drawn for the rank's own batch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.majority import by_ranks, outvoted
from ddp_notebook.diagnosis.source_code.conditions import holds
from ddp_notebook.diagnosis.source_code.shared_names import SharedNames, given_in
from ddp_notebook.diagnosis.training.by_hand import trained_together
from ddp_notebook.diagnosis.training.replicas import Model, differing
from ddp_notebook.diagnosis.training.rules import where
from ddp_notebook.model import Category, Finding, Place, StepStart, cut, name_ranks

_FEWEST_STEPS = 3
_LONGEST_CODE = 80
_DEEPEST = 3
"""Calls of the user's functions that are followed."""
_LIKE = frozenset({"rand_like", "randn_like", "randint_like", "bernoulli"})
_SHAPED = frozenset({"rand", "randn", "randint", "normal"})
_IN_PLACE = frozenset({"normal_", "uniform_", "bernoulli_", "random_", "exponential_"})
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def same_draws(context: Context) -> Iterator[Finding]:
    """Ranks with other samples draw the same numbers in step after step."""
    for model in trained_together(context):
        place = model.first.start_place
        steps = _same_steps(model)
        tree = context.sources.tree(place) if place is not None and steps else None
        draw = _draw(tree, place.line) if tree is not None and place is not None else None
        if draw is None or place is None:
            continue
        at = Place(place.file, draw.lineno)
        yield Finding(
            Category.RNG_MISMATCH,
            tuple(model.of),
            f"the random numbers drawn for each sample are the same on every rank: all were given "
            f"the same seed ({at}: {ast.unparse(draw)})",
            "After the model is made, seed each rank on its own: "
            "torch.manual_seed(seed + dist.get_rank()).",
            evidence=(
                f"before {len(steps)} of the first {len(model.first.starts)} training forwards "
                f"torch's generator had drawn numbers, and was the same on {name_ranks(model.of)}",
                "the model got other samples on each of them",
            ),
        )


def other_constants(context: Context) -> Iterator[Finding]:
    """Tensors that a model holds and that DDP does not send were drawn at random on each rank."""
    for model in context.models.values():
        constants = {rank: replica.constants for rank, replica in model.of.items()}
        for name in differing(constants) if model.whole and len(constants) > 1 else ():
            draw = _kept_draw(context, name.rpartition(".")[2])
            if draw is not None:
                yield _drawn_apart(model, name, draw)


def _drawn_apart(model: Model, name: str, draw: ast.AST) -> Finding:
    values = {
        rank: next(digest.sample for digest in replica.constants if digest.name == name)
        for rank, replica in model.of.items()
    }
    return Finding(
        Category.RNG_MISMATCH,
        outvoted(values),
        f"{name} of {model.title} is drawn at random ({cut(ast.unparse(draw), _LONGEST_CODE)}), "
        "and is another one on each rank: it is no parameter and no buffer, so "
        "DistributedDataParallel does not send rank 0's to the others, and the replicas compute "
        "different things",
        "Make it a buffer (self.register_buffer) before DistributedDataParallel(model), or draw it "
        "with a generator that has the same seed on every rank.",
        evidence=by_ranks({rank: f"{name}: {_numbers(some)}" for rank, some in values.items()}),
    )


def _numbers(sample: Sequence[float | None]) -> str:
    return ", ".join(f"{value:.4g}" for value in sample if value is not None)


def _kept_draw(context: Context, attribute: str) -> ast.AST | None:
    """What an attribute of that name is given, where random numbers are drawn for it.

    And where a forward reads it: others may only be looked at, as a GAN's noise for its pictures.
    """
    trees = context.sources.in_use(where(context.facts))
    names = SharedNames(trees)
    nodes = [node for tree in trees for node in ast.walk(tree)]
    if attribute not in _read_in_forwards(names, nodes):
        return None
    values = (value for node in nodes for name, value in given_in(node) if name == attribute)
    return next((v for v in values if any(map(_draws_in, (v, *names.called_in([v]))))), None)


def _read_in_forwards(names: SharedNames, nodes: list[ast.AST]) -> set[str]:
    """The attributes that forwards read, or what they call."""
    forwards = [n for n in nodes if isinstance(n, _FUNCTIONS) and n.name == "forward"]
    inside = (node for code in names.reached_from(forwards) for node in ast.walk(code))
    read = (n for n in inside if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load))
    return {node.attr for node in read}


def _draws_in(code: ast.AST) -> bool:
    calls = (node for node in ast.walk(code) if isinstance(node, ast.Call))
    return any(_draws(call) or ".random." in ast.unparse(call.func) for call in calls)


def _same_steps(model: Model) -> tuple[int, ...]:
    """The training forwards before which all ranks drew the same, for samples of their own."""
    of = [replica.starts for replica in model.of.values()]
    if len(of) < 2 or not model.whole:
        return ()
    rows = list(enumerate(zip(*of, strict=False)))
    equal = all(len({each.random for each in row}) == 1 for _, row in rows)
    steps = tuple(number for number, row in rows if _drew_for_their_own(row))
    return steps if equal and len(steps) >= _FEWEST_STEPS else ()


def _drew_for_their_own(row: Sequence[StepStart]) -> bool:
    """Every rank drew numbers, and has an input that no other one has."""
    inputs = {start.input for start in row}
    return all(start.drew and start.input for start in row) and len(inputs) == len(row)


def _draw(tree: ast.Module, line: int) -> ast.Call | None:
    """A call that draws numbers for the batch, in the loop around `line` or a function of it."""
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)}
    scope = _innermost(tree, line)
    seen: set[str] = set()
    waiting: list[tuple[ast.AST, int]] = [(scope, 0)] if scope is not None else []
    while waiting:
        node, depth = waiting.pop(0)
        for call in (child for child in ast.walk(node) if isinstance(child, ast.Call)):
            if _is_per_sample(call):
                return call
            name = _name(call)
            if name in functions and name not in seen and depth < _DEEPEST:
                seen.add(name)
                waiting.append((functions[name], depth + 1))
    return next((call for child in _samples_made_in(tree) for call in _calls(child)), None)


def _samples_made_in(tree: ast.Module) -> Iterator[ast.AST]:
    """Where data sets make one sample, on the rank itself: a loader's workers count elsewhere."""
    for node in ast.walk(tree):
        if isinstance(node, _FUNCTIONS) and node.name == "__getitem__":
            yield node


def _calls(function: ast.AST) -> Iterator[ast.Call]:
    """Those that draw numbers from torch's own generator."""
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    yield from (call for call in calls if _draws(call) and not _has_generator(call))


def _draws(call: ast.Call) -> bool:
    of = ast.unparse(call.func).rpartition(".")[0]
    shaped = of == "torch" and _name(call) in _SHAPED
    return shaped or _name(call) in _LIKE or bool(of and _name(call) in _IN_PLACE)


def _has_generator(call: ast.Call) -> bool:
    return any(keyword.arg == "generator" for keyword in call.keywords)


def _innermost(tree: ast.Module, line: int) -> ast.AST | None:
    """The innermost loop around a line, or else its function."""
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (*_LOOPS, *_FUNCTIONS)) and holds(node, line)
    ]
    return max(around, key=lambda node: node.lineno, default=None)


def _name(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _is_per_sample(call: ast.Call) -> bool:
    name = _name(call)
    if _has_generator(call):
        return False
    if name in _LIKE:
        return True
    if name in _IN_PLACE:
        return isinstance(call.func, ast.Attribute)
    return name in _SHAPED and any(_of_a_tensor(expression) for expression in call.args)


def _of_a_tensor(node: ast.AST) -> bool:
    """The size of something: ``len(x)``, ``x.shape[0]``, ``x.size(0)``."""
    return any(
        (isinstance(child, ast.Call) and _name(child) in ("len", "size"))
        or (isinstance(child, ast.Attribute) and child.attr == "shape")
        for child in ast.walk(node)
    )
