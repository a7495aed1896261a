"""The comparison: the first step, parameter and line where they diverge beyond rounding.

Rounding is measured: one rank runs twice, with each batch's samples in two orders. These two runs
differ by rounding, or by random numbers that the program draws for each sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ddp_notebook.diagnosis.against.batches import alike_on_all, other_samples
from ddp_notebook.diagnosis.against.causes import cause_of, evidence_of
from ddp_notebook.model import Place
from ddp_notebook.model.against.comparison import Comparison, Parting
from ddp_notebook.model.against.trail import (
    STAGES,
    Parameter,
    Sketches,
    Trail,
    distance,
    norm,
)

START, BACKWARD, GRADIENT, UPDATE = range(len(STAGES))
_MARGIN = 16
"""How many times the measured rounding still counts as rounding: it is measured only once."""
_EPSILONS = 64
"""How many machine epsilons count as rounding, even if none was measured."""
_RANDOM = 1e-3
"""In the first step, other orders of the same samples differ by less; random numbers by more."""
_MOST_ROUNDING = 0.02
"""Once rounding alone has grown to this size, a difference proves nothing."""

Kept = tuple[Trail, Sketches]


@dataclass(frozen=True)
class Sides:
    """All saved trails: of the ranks, of one rank, and of one rank in another order."""

    ranks: tuple[Kept, ...]
    one: Kept
    turned: Kept

    def parameters(self, step: int) -> tuple[Parameter, ...]:
        """The parameters of the optimizer that makes this step."""
        trail = self.one[0]
        return trail.optimizers[trail.steps[step].optimizer]


def why_not(ranks: Sequence[Trail]) -> str:
    """Why this run cannot be compared with one on a single rank; "" if it can."""
    if broken := _broken(ranks):
        return broken
    if not all(trail.steps for trail in ranks):
        return "no optimizer made a step on every rank."
    if any(trail.sharded for trail in ranks):
        return (
            "the model is sharded (FSDP, DTensor): a rank has parts of its parameters only. "
            "Compare the same training with DistributedDataParallel."
        )
    if not all(step.samples for trail in ranks for step in trail.steps[:1]):
        return (
            "no forward of a DistributedDataParallel model was seen before the first step, so it "
            "is not known what the model got."
        )
    return _layers(ranks[0])


def _broken(trails: Sequence[Trail]) -> str:
    problem = next((trail.problem for trail in trails if trail.problem), "")
    return f"the training steps could not be kept ({problem})." if problem else ""


def _layers(trail: Trail) -> str:
    """Which layers compute something else for other samples, and what to do; "" for none."""
    if trail.batch_norm:
        return (
            f"the model has batch norm ({', '.join(trail.batch_norm)}): each rank normalises by "
            "its own samples, one rank by all. Compare with these layers in eval mode, or with "
            "GroupNorm or LayerNorm in their place."
        )
    if trail.dropout:
        return (
            f"the model has dropout ({', '.join(trail.dropout)}): one rank draws other random "
            "numbers for a sample. Compare with dropout 0."
        )
    return ""


def compare(ranks: Sequence[Kept], one: Kept, turned: Kept) -> Comparison:
    """Where the run on `ranks` diverges from the one on a single rank."""
    sides = Sides(tuple(ranks), one, turned)
    trails = [trail for trail, _ in (*ranks, one, turned)]
    compared = Comparison(len(ranks), assumed=_assumed(trails))
    if broken := _broken(trails):
        return replace(compared, refused=broken)
    steps = min(len(trail.steps) for trail in trails)
    if not steps:
        return replace(compared, refused="no optimizer made a step on one rank.")
    for k in range(steps):
        refused = _cannot_go_on(sides, k)
        step = None if refused else _Step(sides, k)
        if step is None or (refused := step.why_not()):
            return replace(compared, refused=refused)
        rounding = max(compared.rounding, step.rounding)
        compared = replace(compared, rounding=rounding, parting=step.parting())
        if compared.parting is not None:
            return compared
        compared = replace(compared, steps=k + 1, relative=max(compared.relative, step.largest))
    return replace(compared, refused=_left(trails, steps))


def _cannot_go_on(sides: Sides, k: int) -> str:
    """Why step `k` cannot be compared: other samples, another optimizer."""
    ranks = [trail.steps[k] for trail, _ in sides.ranks]
    one, turned = sides.one[0], sides.turned[0]
    shapes = {
        tuple(parameter.numel for parameter in trail.optimizers[trail.steps[k].optimizer])
        for trail, _ in (*sides.ranks, sides.one, sides.turned)
    }
    if len(shapes) > 1 or len({step.optimizer for step in (*ranks, one.steps[k])}) > 1:
        return f"in step {k + 1} another optimizer makes the step on one rank."
    for steps in (one.steps[k], turned.steps[k]):
        why = other_samples(ranks, steps)
        if why:
            return (
                f"in step {k + 1} {why}. One rank gets the batches of all ranks joined where they "
                "come from a DataLoader whose sampler gives each rank its indices "
                "(DistributedSampler). Data that a script parts, draws or changes at random by "
                "itself cannot be joined."
            )
    return ""


def _other_start(world_size: int) -> str:
    return (
        "the parameters are not the same before the first step: the script makes them from another "
        f"state of the random numbers on {world_size} ranks than on one, or loads what an earlier "
        "run has saved. Set the seed before the model is made: torch.manual_seed(0)."
    )


def _assumed(trails: Sequence[Trail]) -> tuple[str, ...]:
    *ranks, _, _ = trails
    sentences = [
        f"one rank got each batch of the {len(ranks)} ranks joined. That the model got the same "
        "samples was checked in each step, by their content; that they have the same targets was "
        "not."
    ]
    if any(trail.rates_given for trail in trails):
        sentences.append(
            "the script has another learning rate on one rank: there it got that of the "
            f"{len(ranks)} ranks."
        )
    alike = sum(
        alike_on_all(steps) for steps in zip(*(trail.steps for trail in ranks), strict=False)
    )
    if alike:
        sentences.append(
            f"in {alike} of {len(ranks[0].steps)} steps every rank got the same samples as the "
            "others, and so did one rank, as often: more ranks then compute nothing more than one."
        )
    return tuple(sentences)


def _left(trails: Sequence[Trail], steps: int) -> str:
    """Why not all steps were compared; "" if all were."""
    if any(trail.cut for trail in trails):
        return f"there was no room to keep more than {steps} steps."
    counts = [len(trail.steps) for trail in trails]
    if len(set(counts)) > 1:
        *ranks, one, _ = counts
        return f"the optimizers made {max(ranks)} steps on {len(ranks)} ranks and {one} on one."
    return ""


class _Step:
    """One training step on all sides."""

    def __init__(self, sides: Sides, k: int) -> None:
        self._sides = sides
        self._k = k
        self._parameters = sides.parameters(k)
        self._scales = [self._scale(stage) for stage in range(len(STAGES))]
        self._noise = [self._noise_of(stage) for stage in range(len(STAGES))]
        self.rounding = max(self._noise[GRADIENT], self._noise[UPDATE])
        """The relative difference of two sample orders, over all parameters or gradients."""
        self.largest = 0.0
        """What the ranks differ by from one rank, likewise, after `parting`."""

    def why_not(self) -> str:
        """Why this step cannot be compared; "" if it can."""
        first = self._k == 0
        if not math.isfinite(self.rounding):
            return f"in step {self._k + 1} values on one rank are not finite."
        if first and self.rounding > _RANDOM:
            return (
                f"two runs on one rank that differ only in the order of the samples differ by "
                f"{self.rounding:.1%} in the first step. That is no rounding: the program draws "
                "random numbers for its samples (dropout, augmentation), or computes what depends "
                "on their order."
            )
        if self.rounding > _MOST_ROUNDING:
            return (
                f"from step {self._k + 1} on two runs on one rank that differ only in the order of "
                f"the samples differ by {self.rounding:.1%}: differences between ranks tell "
                "nothing any more."
            )
        return _other_start(len(self._sides.ranks)) if first and self._starts_elsewhere() else ""

    def _starts_elsewhere(self) -> bool:
        """True when rank 0 begins with other values than one rank."""
        return any(
            self._of(self._sides.ranks[0], START, p) != self._of(self._sides.one, START, p)
            for p in range(len(self._parameters))
        )

    def parting(self) -> Parting | None:
        """Where the ranks diverge from one rank in this step; None for nowhere."""
        for stage in (START, GRADIENT, UPDATE):
            parted = {
                p: ranks for p in range(len(self._parameters)) if (ranks := self._who(stage, p))
            }
            if parted:
                return self._parting(stage, parted)
            self.largest = max(self.largest, self._distance(stage))
        return None

    def _parting(self, stage: int, parted: dict[int, tuple[int, ...]]) -> Parting:
        first = next(iter(parted))
        early = stage == GRADIENT and bool(self._who(BACKWARD, first))
        where = BACKWARD if early else stage
        place, until = self._lines(where, parted[first][0])
        one = self._of(self._sides.one, stage, first)
        scale = norm(one)
        away = max(
            distance(self._of(self._sides.ranks[r], stage, first), one) for r in parted[first]
        )
        ranks = [self._tensors(rank, stage) for rank in self._sides.ranks]
        alone = self._tensors(self._sides.one, stage)
        steps = [trail.steps[self._k] for trail, _ in self._sides.ranks]
        return Parting(
            self._k + 1,
            self._parameters[first].name,
            tuple(sorted({rank for ranks in parted.values() for rank in ranks})),
            STAGES[where],
            place,
            until,
            away / scale if scale else math.inf,
            self._noise[stage],
            len(parted) - 1,
            evidence_of(ranks, alone, steps, self._sides.one[0].steps[self._k]),
            cause_of(
                STAGES[where],
                ranks,
                alone,
                steps,
                self._sides.one[0].steps[self._k],
                first=self._k == 0,
            ),
        )

    def _lines(self, stage: int, rank: int) -> tuple[Place | None, Place | None]:
        """The line that computed what diverges, or the lines between which it diverged."""
        steps = self._sides.ranks[rank][0].steps
        step, before = steps[self._k], steps[self._k - 1].place if self._k else None
        return {
            START: (before, step.place),
            BACKWARD: (step.backward, None),
            GRADIENT: (step.backward, step.place),
            UPDATE: (step.place, None),
        }[stage]

    def _tensors(self, kept: Kept, stage: int) -> list[Sequence[float]]:
        return [self._of(kept, stage, p) for p in range(len(self._parameters))]

    def _who(self, stage: int, p: int) -> tuple[int, ...]:
        """The ranks whose sketch of parameter `p` differs from one rank's beyond rounding."""
        one = self._of(self._sides.one, stage, p)
        twin = distance(one, self._of(self._sides.turned, stage, p))
        parameter = self._parameters[p]
        size = max(norm(one), self._scales[stage] * math.sqrt(parameter.numel))
        bound = max(
            _MARGIN * max(twin, self._noise[stage] * size), _EPSILONS * parameter.epsilon * size
        )
        return tuple(
            rank
            for rank, kept in enumerate(self._sides.ranks)
            if not _near(self._of(kept, stage, p), one, bound)
        )

    def _scale(self, stage: int) -> float:
        """The size of a value, on average over all parameters: what cancels out is as large."""
        of_all = sum(
            norm(self._of(self._sides.one, stage, p)) ** 2 for p in range(len(self._parameters))
        )
        count = sum(parameter.numel for parameter in self._parameters)
        return math.sqrt(of_all / count) if count else 0.0

    def _noise_of(self, stage: int) -> float:
        return self._relative(self._sides.turned, stage)

    def _distance(self, stage: int) -> float:
        return max(self._relative(rank, stage) for rank in self._sides.ranks)

    def _relative(self, kept: Kept, stage: int) -> float:
        """What one side differs by from one rank, in parts of it, over all parameters."""
        apart = of_all = 0.0
        for p in range(len(self._parameters)):
            one = self._of(self._sides.one, stage, p)
            apart += distance(self._of(kept, stage, p), one) ** 2
            of_all += norm(one) ** 2
        if not apart:
            return 0.0
        return math.sqrt(apart / of_all) if of_all else math.inf

    def _of(self, kept: Kept, stage: int, p: int) -> Sequence[float]:
        return kept[1].of(self._k, stage, p)


def _near(some: Sequence[float], one: Sequence[float], bound: float) -> bool:
    if all(map(math.isfinite, some)) and all(map(math.isfinite, one)):
        return distance(some, one) <= bound
    # Values that are not finite on both sides do not count as a difference.
    return not all(map(math.isfinite, some)) and not all(map(math.isfinite, one))
