"""Rules about states: loaded on some ranks only; weights that were one tensor, and are two."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from itertools import combinations
from typing import NamedTuple

from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.majority import by_ranks, outvoted
from ddp_notebook.diagnosis.training.replicas import Model, differing, evaluated_models, some
from ddp_notebook.diagnosis.training.rules import optimizers
from ddp_notebook.model import (
    Category,
    Finding,
    OptimizerFacts,
    Place,
    ReplicaFacts,
    counted,
    in_brackets,
    name_ranks,
    verb,
)


def loaded_on_some(context: Context) -> Iterator[Finding]:
    """Replicas or optimizers differ, and load_state_dict was called for them on some ranks only.

    Before a model is wrapped, that is as it should be: DDP sends what rank 0 has.
    """
    for key, model in context.models.items():
        if not model.whole or not all(map(_steps_together, model.of.values())):
            continue
        if model.diverged:
            loads = {
                rank: (replica.loads, replica.load_place) for rank, replica in model.of.items()
            }
            yield from _finding(model, f"{model.title} or a part of it", loads, model.diverged)
        for of in optimizers(context.facts).values():
            if set(of) == set(model.of) and all(
                key in optimizer.replicas for optimizer in of.values()
            ):
                yield from _of_optimizer(model, of)


def loaded_for_evaluation(context: Context) -> Iterator[Finding]:
    """Ranks sum up what they evaluate with a model that some of them alone have loaded."""
    for model in evaluated_models(context.facts):
        summed = all(any(e.summed for e in each.evaluations) for each in model.of.values())
        values = {rank: replica.begins for rank, replica in model.of.items()}
        if summed and model.whole and len(set(values.values())) > 1 and () not in values.values():
            loads = {
                rank: (replica.loads, replica.load_place) for rank, replica in model.of.items()
            }
            yield from _finding(model, model.title, loads, ("values of its parameters",))


def _steps_together(each: ReplicaFacts) -> bool:
    """True of a replica all of whose steps used the gradients of all ranks."""
    apart = each.local_steps or each.bypassed_steps or each.hook
    return bool(each.steps and not apart)


def _of_optimizer(model: Model, of: Mapping[int, OptimizerFacts]) -> Iterator[Finding]:
    names = model.diverged or differing({rank: optimizer.state for rank, optimizer in of.items()})
    if names:
        title = f"the optimizer ({next(iter(of.values())).type}) of {model.title}"
        loads = {rank: (optimizer.loads, optimizer.load_place) for rank, optimizer in of.items()}
        yield from _finding(model, title, loads, names)


def _finding(
    model: Model, title: str, loads: Mapping[int, tuple[int, Place | None]], names: tuple[str, ...]
) -> Iterator[Finding]:
    """What loads have to do with it: nothing, where all ranks loaded or none did."""
    loaded = tuple(rank for rank, (count, _) in loads.items() if count)
    others = tuple(rank for rank in loads if rank not in loaded)
    if not loaded or not others:
        return
    place = loads[loaded[0]][1]
    at = in_brackets(place)
    # What rank 0 loads is meant for all; any other may have loaded by mistake. Of two, either.
    ranks = outvoted({rank: rank in loaded for rank in loads})
    how = (
        f"load_state_dict of {title} was called on {name_ranks(loaded)} and never on "
        f"{name_ranks(others)}{at}: nothing sends that state to the other ranks, and they differ"
    )
    if 0 in loaded and len(loads) > 2:
        ranks = others
        how = (
            f"{verb(others, 'lacks', 'lack')} a state of {title} that {name_ranks(loaded)} loaded"
            f"{at}: load_state_dict was called there alone, and nothing sends the state to the "
            "other ranks"
        )
    yield Finding(
        Category.CHECKPOINT_MISUSE,
        ranks,
        how,
        "Load the state on every rank (torch.load(path, map_location=...)); only what a model has "
        "before DistributedDataParallel(model) is sent from rank 0 to all.",
        evidence=(
            *by_ranks(
                {
                    rank: f"{counted(count, 'call')} of load_state_dict"
                    for rank, (count, _) in loads.items()
                }
            ),
            f"not the same on {name_ranks(model.of)}: {some(names)}",
        ),
    )


def untied(context: Context) -> Iterator[Finding]:
    """Weights that the code makes one tensor began with equal values, and are two by now."""
    for model in context.models.values():
        for pair in model.first.twins:
            line = context.sources.ties(*pair)
            if line is None or not all(_apart(replica, pair) for replica in model.of.values()):
                continue
            one, other = pair
            yield Finding(
                Category.WEIGHT_TYING_LOST,
                tuple(model.of),
                f"{one} and {other} of {model.title} are two parameters, which had the same values "
                f"and are trained apart, though the code makes them one tensor ({line})",
                "Tie them again after what replaces parameters (load_state_dict(assign=True), "
                "deepcopy of a part, new layers), and before DistributedDataParallel(model).",
                evidence=(
                    f"equal when the model was wrapped, not equal after {model.first.steps} steps: "
                    f"{one}, {other}",
                    f"{line}: {line.text}",
                ),
            )


def untied_over_ranks(context: Context) -> Iterator[Finding]:
    """Weights that the code makes one, or gives the same values, are in stages of a pipeline."""
    for first, second in _parted(context):
        one, other = first[0].name, second[0].name
        sources = context.sources
        line = sources.ties(one, other) if one != other else sources.broadcasts(one)
        if line is None:
            continue
        have, has = (tuple(matrix.rank for matrix in each) for each in (first, second))
        if one == other:
            both = name_ranks((*have, *has))
            made = f"the code gives {both} the same values of {one} ({line}), in unlike models"
        else:
            made = (
                f"the code makes {one} and {other} one tensor ({line}); "
                f"{verb(have, 'has', 'have')} the first and {name_ranks(has)} the second"
            )
        yield Finding(
            Category.WEIGHT_TYING_LOST,
            tuple(sorted({*have, *has})),
            f"{made}; each trains its own, and they are not the same any more",
            "Have all of them begin with the same values, and all_reduce the gradients of the two "
            "over a group of these ranks (new_group) before each step.",
            evidence=(
                f"equal before the first step, not equal some steps later: {one} of "
                f"{name_ranks(have)}, {other} of {name_ranks(has)}",
                f"{line}: {line.text}",
            ),
        )
        return


class _Matrix(NamedTuple):
    rank: int
    name: str
    later: str
    """The hash of its values some steps later."""
    model: str
    beside: frozenset[str]
    """The names of the matrices of its model."""


def _parted(context: Context) -> Iterator[tuple[list[_Matrix], list[_Matrix]]]:
    """Matrices that began equal on some ranks and on others, and are no more equal anywhere.

    Of unlike models, none of which has both: those on one rank it could make one tensor itself.
    """
    for alike in _equal_at_first(context):
        for one, other in combinations(alike, 2):
            names = frozenset((one[0].name, other[0].name))
            if len(names) == 1:
                apart = one[0].model != other[0].model
            else:
                apart = not any(names <= each.beside for each in (*one, *other))
            ended = ({matrix.later for matrix in each} for each in (one, other))
            if apart and set.isdisjoint(*ended):
                yield one, other


def _equal_at_first(context: Context) -> Iterator[list[list[_Matrix]]]:
    """The matrices that began with the same values, not constant ones, by model and name."""
    begun: dict[str, dict[Hashable, list[_Matrix]]] = defaultdict(lambda: defaultdict(list))
    for rank, facts in sorted(context.facts.items()):
        for each in facts.plain:
            beside = frozenset(first.name for first, _ in each.matrices)
            for first, later in each.matrices:
                if first.hash and len(set(first.sample)) > 1:
                    matrix = _Matrix(rank, first.name, later.hash, each.key, beside)
                    begun[first.hash][first.name, each.key].append(matrix)
    yield from (list(alike.values()) for alike in begun.values())


def _apart(each: ReplicaFacts, pair: tuple[str, str]) -> bool:
    """True when both are parameters of the replica, with other values."""
    digests = {digest.name: digest for digest in each.parameters}
    one, other = (digests.get(name) for name in pair)
    if pair not in each.twins or one is None or other is None or not each.steps:
        return False
    return (one.norm, one.sample) != (other.norm, other.sample)
