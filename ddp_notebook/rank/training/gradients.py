"""What happens to an optimizer's gradients between two steps, in the first steps of a run.

A few values of a few gradients are recorded after the backward, and before the step. They show by
which factor all gradients were multiplied in between, what ranks made of each other's, and whether
a step's gradients were still there, unchanged, when the next backward began. The graph of the first
losses says by what they were divided.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ddp_notebook import model
from ddp_notebook.model import Ranks
from ddp_notebook.rank import torch_private
from ddp_notebook.rank.collectives.call_sites import Line, place_of
from ddp_notebook.rank.training.parallel import fsdp_private

WATCHED_STEPS = 8
_PARAMETERS, _VALUES = 6, 8
_SAMPLED_STEPS = 3
_ALIKE = 1e-4
"""Factors of two values with a smaller relative difference count as equal."""
_FEWEST = 4
"""How many values must agree on a factor."""
_MOST_FACTORS, _MOST_BETWEEN = 4, 32


def read_loss(loss: torch.Tensor, line: Line | None) -> model.LossFacts:
    """How a loss was computed, as its autograd graph shows."""
    node, factor = _constants(loss.grad_fn)
    count = torch_private.averaged_over(node)
    ignores = torch_private.ignores_targets(node)
    if node is not None and count is not None:
        factor *= _constants(node.next_functions[0][0])[1]
    elif (means := _of_means(node)) is not None:
        factor, count = factor * means, 0.0
    divisor = 1 / factor if torch_private.is_sum(node) and 0 < factor < 1 else 0.0
    mean = count is not None
    count = count or torch_private.summed_targets(node)
    return model.LossFacts(factor, mean, count, place_of(line), divisor, ignores)


def _of_means(node: Any) -> float | None:
    """The largest factor of the means that a step of the graph adds up; None if it does not."""
    largest, ahead = 0.0, [*torch_private.added_by(node)]
    for _ in range(2 * _MOST_FACTORS):
        if not ahead:
            break
        each, factor = _constants(ahead.pop())
        ahead += torch_private.added_by(each)
        if torch_private.averaged_over(each) is not None:
            largest = max(largest, factor)
        elif not torch_private.added_by(each):
            return None
    return largest if largest and not ahead else None


def _constants(node: Any) -> tuple[Any, float]:
    """The first node of a graph that does not multiply by a number, and the factor until there."""
    factor = 1.0
    for _ in range(_MOST_FACTORS):
        by = torch_private.multiplied_by(node)
        if by is None:
            break
        factor *= by
        node = node.next_functions[0][0]
    return node, factor


def named(groups: Iterable[Any]) -> list[tuple[str, torch.Tensor]]:
    """An optimizer's parameters, named by their places in its groups."""
    return [
        (f"param_groups[{g}]['params'][{i}]", parameter)
        for g, group in enumerate(groups)
        for i, parameter in enumerate(group["params"])
    ]


def _have_one_hook(parameters: Iterable[torch.Tensor]) -> bool:
    codes = [
        {getattr(hook, "__code__", None) for hook in torch_private.gradient_hooks(parameter)}
        for parameter in parameters
    ]
    return bool(codes and set.intersection(*codes) - {None})


class Gradients:
    """The gradients of one optimizer."""

    def __init__(self, groups: Iterable[Any], flat: Mapping[int, Ranks]) -> None:
        everything = named(groups)
        parameters = [tensor for _, tensor in everything]
        self.mesh, sharded = fsdp_private.sharded_in(parameters, flat)
        self._some = [weakref.ref(each) for each in _spread(sharded or parameters, _PARAMETERS)]
        self.sampled = tuple(name for name, _ in _spread(everything, _PARAMETERS))
        """Names of the parameters that values are taken of, where none is sharded."""
        self.one_hook = _have_one_hook([tensor for _, tensor in _spread(everything, _PARAMETERS)])
        """Whether all of `sampled` have one function of the user's as a hook on their gradients."""
        self._pending = (
            fsdp_private.Pending({id(tensor) for tensor in parameters}) if self.mesh else None
        )
        self.begin()

    def begin(self) -> None:
        """Forget the last run."""
        self.factors: list[float | None] = []
        self.before_scaler: list[float | None] = []
        """Of `factors` the part before `GradScaler.step`; None of a step without one."""
        self._before_scaler: float | None = None
        self.pending_steps = 0
        self.watched_steps = self.leftover_steps = 0
        self.between: list[float | None] = []
        """By what a backward's gradients were multiplied before the next one of the same step."""
        self.watched = True
        """While this run has few steps, and at the next step if it is the 16th, the 32nd..."""
        self._is_early = True
        self.first: tuple[tuple[float, ...], tuple[float, ...]] = (), ()
        """Some gradients of the first step, and the parameters that they were for, before it."""
        self.samples: list[model.GradientSample] = []
        """Gradients of the steps after the first one."""
        self.later: list[model.GradientSample] = []
        """Those of the 16th step, the 32nd, and so on: what is trained may be more by then."""
        self._steps = 0
        self.moved_steps = 0
        self.last_weights: tuple[tuple[float, ...], ...] = ()
        self._after_backward: list[list[float]] = []
        self._left: list[tuple[Any, list[float]]] = []
        """After the last step, or the last backward since."""
        self._backwards = self._leftover_backwards = 0
        self._finds_leftover = False
        """Whether the backward that runs began with the gradients of the step before."""
        self.mixed_steps = 0
        """Steps with what a backward for another optimizer's step left, and one for its own added.
        """
        self._left_by_other: list[tuple[Any, list[float]]] = []
        self._meets_other = False

    def backward_begins(self) -> None:
        """Record whether the gradients of the last step are still there, unchanged.

        With those that backwards have added since, where a step follows several of them.
        """
        self._backwards += 1
        if not self._is_early:
            return
        if self._after_backward and len(self.between) < _MOST_BETWEEN:
            now = list(map(_values, self._gradients()))
            self.between.append(_factor(self._after_backward, now))
        self._finds_leftover = bool(self._left) and _are_there(self._left, self._gradients())
        if self._left_by_other:
            self._meets_other |= _are_there(self._left_by_other, self._gradients())
            self._left_by_other = []

    def other_steps(self) -> None:
        """Another optimizer has made a step, with a backward that went through this one's model."""
        if self._is_early and self._after_backward:
            self._left_by_other = self._kept()

    def backward_ends(self) -> None:
        """Sample the gradients that the backward has computed and reduced."""
        self._after_backward = [_values(tensor) for tensor in self._gradients()]
        # One that adds nothing to them is of other parameters: code gives these their gradients.
        added = self._after_backward != [values for _, values in self._left]
        self._leftover_backwards += self._finds_leftover and added
        self._finds_leftover = False
        if self._left:
            self._left = self._kept()

    def scaler_steps(self) -> None:
        """`GradScaler.step` begins: it divides by the scale what was not yet, then has a step."""
        if self._is_early:
            self._before_scaler = _factor(
                self._after_backward, list(map(_values, self._gradients()))
            )

    def step_begins(self) -> bool:
        """Record their factor since the backward; True if other gradients are not reduced yet."""
        if not self._is_early:
            if self.watched:
                self.later.append(self._sample([_values(tensor) for tensor in self._gradients()]))
        else:
            now = [_values(tensor) for tensor in self._gradients()]
            weights = self._weights()
            self.factors.append(_factor(self._after_backward, now))
            self.before_scaler.append(self._before_scaler)
            self._before_scaler = None
            if not self.watched_steps:
                self.first = _joined(now), _joined(weights)
            elif len(self.samples) < _SAMPLED_STEPS:
                self.samples.append(self._sample(now))
            self.moved_steps += bool(self.last_weights) and weights != self.last_weights
            self._after_backward = []
        pending = bool(self._pending)
        self.pending_steps += pending
        return pending

    def step_ends(self) -> None:
        """Record what the optimizer left in the gradients that it used."""
        self._steps = steps = self._steps + 1
        if not self._is_early:
            self.watched = not steps & (steps + 1)
            return
        self.watched_steps += 1
        self._is_early = self.watched_steps < WATCHED_STEPS
        self.watched = self._is_early or not steps & (steps + 1)
        self.last_weights = self._weights()
        self.mixed_steps += self._meets_other
        self._meets_other, self._left_by_other = False, []
        if self._backwards:
            self.leftover_steps += self._leftover_backwards == self._backwards
        self._backwards = self._leftover_backwards = 0
        self._finds_leftover = False
        self._left = self._kept()

    def _sample(self, now: list[list[float]]) -> model.GradientSample:
        return model.GradientSample(_rows(self._after_backward), _rows(now), self._weights())

    def _kept(self) -> list[tuple[Any, list[float]]]:
        return [
            (weakref.ref(tensor) if tensor is not None else _nothing, _values(tensor))
            for tensor in self._gradients()
        ]

    def _weights(self) -> tuple[tuple[float, ...], ...]:
        return _rows(_values(ref()) for ref in self._some)

    def _gradients(self) -> Iterator[torch.Tensor | None]:
        for ref in self._some:
            parameter = ref()
            yield parameter.grad if parameter is not None else None


class Hooked:
    """What a communication hook of the user's made of a DDP object's gradients.

    Of the first bucket of the first backwards: what the hook was given, and what it left.
    """

    def __init__(self) -> None:
        self.samples: list[model.GradientSample] = []
        self._own: list[tuple[weakref.ref[torch.Tensor], list[float]]] = []

    def bucket(self, bucket: Any) -> None:
        """The hook is about to get a bucket."""
        if len(self.samples) < _SAMPLED_STEPS and not self._own:
            pairs = list(zip(bucket.parameters(), bucket.gradients(), strict=False))
            self._own = [(weakref.ref(p), _values(g)) for p, g in _spread(pairs, _PARAMETERS)]

    def backward_ends(self) -> None:
        """The hook is over, and the parameters have its result."""
        if self._own:
            parameters = [ref() for ref, _ in self._own]
            used = _rows(_values(p.grad) if p is not None else [] for p in parameters)
            self.samples.append(model.GradientSample(_rows(v for _, v in self._own), used, ()))
            self._own = []


def _are_there(
    left: Sequence[tuple[Any, list[float]]], gradients: Iterable[torch.Tensor | None]
) -> bool:
    """Whether all gradients are those that were left, and have the values that they had."""
    same = [
        ref() is grad and any(values) and _values(grad) == values
        for (ref, values), grad in zip(left, gradients, strict=False)
    ]
    return bool(same) and all(same)


def _nothing() -> None:
    return None


def _spread(items: list[Any], most: int) -> list[Any]:
    # By an odd number: every second one may be a bias.
    return items[:: max(1, len(items) // most) | 1][:most]


def _values(gradient: Any) -> list[float]:
    """Some values, evenly spread; empty if they cannot be read without waiting."""
    local = fsdp_private.local_part(gradient) if gradient is not None else None
    if local is None or local.layout is not torch.strided or not local.is_contiguous():
        return []
    flat = local.view(-1)
    values: list[float] = flat[:: max(1, flat.numel() // _VALUES)][:_VALUES].tolist()
    return values


def _rows(values: Iterable[Iterable[float]]) -> tuple[tuple[float, ...], ...]:
    return tuple(map(tuple, values))


def _joined(values: Iterable[Iterable[float]]) -> tuple[float, ...]:
    return tuple(value for some in values for value in some)


def _factor(before: list[list[float]], after: list[list[float]]) -> float | None:
    """The factor by which all values were multiplied; None if it is not the same for all."""
    ratios = [
        b / a
        for one, other in zip(before, after, strict=False)
        if len(one) == len(other)
        for a, b in zip(one, other, strict=True)
        if a
    ]
    if len(ratios) < _FEWEST:
        return None
    low, high = min(ratios), max(ratios)
    alike = high - low <= _ALIKE * max(abs(low), abs(high))  # False for what is not a number
    return float(f"{sum(ratios) / len(ratios):.6g}") if alike else None
