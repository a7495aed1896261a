"""A rank's report of its training after a run: replicas, optimizers, samplers.

The values that should be the same on all ranks can be compared without sending it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ddp_notebook.model.collectives import Place
from ddp_notebook.model.ranks import Ranks


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """A digest of a tensor. `hash` is of its bytes in order, "" if it was not computed.

    `norm` is its 2-norm and `sample` a few of its values, evenly spread. None in them means values
    that are not finite; `finite` is then False.
    """

    name: str
    numel: int
    hash: str = ""
    norm: float | None = None
    sample: tuple[float | None, ...] = ()
    finite: bool = True


@dataclass(slots=True)
class WorkFacts:
    """A user line that started collectives and did not wait for all of them in time.

    The rank counts in it; as part of a report nothing changes it.

    Of `issued`, `unwaited` were never waited for; the tensors of `written` were changed, and those
    of `stepped` were gradients that an optimizer used, before they were waited for.
    """

    operation: str
    issued: int = 0
    unwaited: int = 0
    written: int = 0
    stepped: int = 0
    place: Place | None = None


@dataclass(slots=True)
class FunctionalFacts:
    """Collectives of torch.ops._c10d_functional in this run, whose results must be waited for.

    `direct` were called by the user's own lines, `others` by torch; `left` results were never
    given to wait_tensor.
    """

    direct: int = 0
    others: int = 0
    left: int = 0
    operation: str = ""
    place: Place | None = None
    """The line of the first direct call."""


@dataclass(frozen=True, slots=True)
class EvaluationFacts:
    """Forwards of a model without gradients, one after another, with no backward in between.

    `inputs` are hashes of what the first ones got, "" where it could not be read.
    """

    backwards: int
    """How many backwards the rank had begun."""
    training: bool = False
    """The module was in training mode."""
    loader: bool = False
    """The batches came from a DataLoader that was not trained on."""
    inputs: tuple[str, ...] = ()
    statistics: str = ""
    """A hash of the statistics of batches, "" without any, or with too many."""
    wrote: bool | None = None
    """Something was printed between its begin and the next backward; None where unknown."""
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class StepStart:
    """The moment of a training forward, before it. `random` is a hash of torch's generator.

    `drew`: random numbers were drawn since the last training step, by other than a DataLoader.
    """

    random: str
    drew: bool = False
    input: str = ""
    """A hash of what the model got."""


@dataclass(frozen=True, slots=True)
class ReplicaCounts:
    """The activity of one DistributedDataParallel object in this run; equal `key`s are one model.

    A step counts for it when an optimizer has updated parameters of it: `local_steps` with
    gradients of backwards that no_sync covered, `bypassed_steps` of forwards around the
    wrapper, `unready_steps` of backwards in which `unready` parameters got no gradient.
    """

    key: str
    type: str = ""
    """Class of the module inside."""
    name: str = ""
    """The user's variable; "" without one."""
    place: Place | None = None
    """Where it was made."""
    could_find_unused: bool = False
    """DDP sees in a forward which parameters the backward will reach: the forward gives one tensor,
    a backward comes before the next, and no parameter came in another's place."""
    forwards: int = 0
    """Through the wrapper, with gradients."""
    no_sync_forwards: int = 0
    """How many of `forwards` were under no_sync."""
    bypasses: int = 0
    """Forwards of the module inside that did not come through the wrapper, with gradients."""
    bypass_place: Place | None = None
    local_place: Place | None = None
    """The first forward under no_sync."""
    backwards: int = 0
    steps: int = 0
    local_steps: int = 0
    bypassed_steps: int = 0
    unready_steps: int = 0
    bad_place: Place | None = None
    """The first step of those that used gradients of this rank alone."""
    unready: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplicaFacts(ReplicaCounts):
    """One DistributedDataParallel object: what it did, what it holds, and how it was used."""

    device: str = ""
    backend: str = ""
    group_size: int = 0
    group: Ranks = ()
    """The ranks among which it reduces gradients; none where that is not known any more."""
    hook: str = ""
    """A communication hook that may leave replicas apart for a while; "" for none."""
    broadcast_buffers: bool = True
    outside: tuple[str, ...] = ()
    """Parameters that are trained, and that its reducer does not know."""
    unheld: tuple[str, ...] = ()
    """Parameters that get gradients, that no optimizer holds, and that have not changed: a few,
    behind others that an optimizer holds."""
    twins: tuple[tuple[str, str], ...] = ()
    """Parameters of one shape in unlike places that had the same values when it was wrapped."""
    parameters: tuple[TensorDigest, ...] = ()
    gradients: tuple[TensorDigest, ...] = ()
    buffers: tuple[TensorDigest, ...] = ()
    buffer_order: tuple[str, ...] = ()
    """In the order in which they are sent."""
    batch_buffers: tuple[str, ...] = ()
    """Statistics of batches: ranks may have others."""
    loads: int = 0
    """How often load_state_dict was called of it, or of the module inside, once it was wrapped."""
    load_place: Place | None = None
    evaluations: tuple[EvaluationFacts, ...] = ()
    """The first ones."""
    starts: tuple[StepStart, ...] = ()
    """Of its first training forwards."""
    autocast: str = ""
    """The state of torch.autocast in the first of them: ``bfloat16``; "" for off."""
    start_place: Place | None = None
    """Where the first of them was called."""


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """An optimizer that made steps in this run. `lrs`: of each group, None if not a number.

    `replicas` are the keys of the models it updates. `unwrapped` are parameters that belong to
    no DistributedDataParallel object, while others of it do.
    """

    key: str
    type: str = ""
    steps: int = 0
    lrs: tuple[float | None, ...] = ()
    replicas: tuple[str, ...] = ()
    unwrapped: tuple[TensorDigest, ...] = ()
    state: tuple[TensorDigest, ...] = ()
    place: Place | None = None
    """Where its last step was made."""
    options: tuple[str, ...] = ()
    """Further settings of its groups, in the first step: ``weight_decay=0.1``."""
    metrics: tuple[float, ...] = ()
    """The first metrics that its ReduceLROnPlateau was given."""
    begins: tuple[TensorDigest, ...] = ()
    """Of parameters without DDP, before its first step in this process."""
    loads: int = 0
    """How often its load_state_dict was called."""
    load_place: Place | None = None
    idle_steps: int = 0
    """Of `steps`, those in which none of its parameters had a gradient."""
    numels: tuple[int, ...] = ()
    """Of its parameters, sorted; none for one with models that had gradients."""
    unheld: tuple[str, ...] = ()
    """Parameters of its models that get gradients, and that no optimizer holds: of as many
    dimensions as the `idle_tensors` that it holds, which are in no model and never get one."""
    idle_tensors: int = 0
    mesh: Ranks = ()
    """Ranks of the default group among which its parameters are sharded; none where they are
    not."""
    pending_steps: int = 0
    """Steps made while a sharded model (FSDP2) still had unreduced gradients."""
    pending_place: Place | None = None
    factors: tuple[float | None, ...] = ()
    """The factor of all gradients between the backward and the step, of the first steps;
    None where it was no one factor, or not seen."""
    between: tuple[float | None, ...] = ()
    """The factor of the gradients that a backward left, until the next one of the same
    step, in the first steps; None where it was no one factor."""


@dataclass(frozen=True, slots=True)
class SamplerFacts:
    """A DistributedSampler that was iterated in this run.

    `epochs` has the epoch of each iteration during which the model was trained, the first ones.
    """

    key: str
    length: int = 0
    """The number of samples in the data set."""
    num_replicas: int = 0
    rank: int = 0
    shuffle: bool = True
    seed: int = 0
    drop_last: bool = False
    epochs: tuple[int, ...] = ()
    epochs_set: int = 0
    """How often set_epoch was called."""
    place: Place | None = None
    """Where it was iterated first."""
    data: str = ""
    """A hash of what the data set has, in whatever order; "" where that cannot be read."""
    order: str = ""
    """Hashes of the orders in which its lists and tensors have that; behind a bar one of the
    indices by which it is a part of another."""


@dataclass(frozen=True, slots=True)
class LoaderFacts:
    """A DataLoader without a DistributedSampler whose batches trained a model in this run.

    `inputs` are hashes of what the first forwards got, "" where it could not be read.
    """

    key: str
    length: int = 0
    """Samples of the data set; 0 where unknown."""
    sampler: str = ""
    """Class of its sampler; "" of a stream."""
    inputs: tuple[str, ...] = ()
    place: Place | None = None
    stream: str = ""
    """Class of its data set, where that is an IterableDataset."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A tensor that DTensor was told to be the same on all of `ranks`: Replicate, in from_local.

    `backwards` is how many backwards this rank had begun.
    """

    backwards: int
    ranks: Ranks
    tensor: TensorDigest
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class Copy:
    """A trained parameter of a model with DTensors, which all of `ranks` have, none a part of it.

    `declared`: as a DTensor it is Replicate there; otherwise nothing but the plan says so. `begin`
    is what it was before the first step, `end` at the end, or after one of the first steps.
    """

    name: str
    ranks: Ranks
    declared: bool
    begin: TensorDigest
    end: TensorDigest


@dataclass(frozen=True, slots=True)
class Input:
    """A hash of what a model got in a training forward, after so many backwards; "" if unread.

    `random` is a hash of torch's generator then; "" where unknown.
    """

    backwards: int
    hash: str
    random: str = ""


@dataclass(frozen=True, slots=True)
class Forwards:
    """The first training forwards of a model during which ranks communicate."""

    key: str
    inputs: tuple[Input, ...] = ()
    place: Place | None = None
    drops: bool = False
    """It has layers that drop values at random."""


@dataclass(frozen=True, slots=True)
class SplitFacts:
    """One rank's knowledge of models that are split over ranks; `losses` are those of backwards."""

    claims: tuple[Claim, ...] = ()
    copies: tuple[Copy, ...] = ()
    forwards: tuple[Forwards, ...] = ()
    sums: tuple[Ranks, ...] = ()
    """The groups over which a function of the user's own (torch.autograd.Function) sums up partial
    results: activations in its forward, or their gradients in its backward."""
    losses: tuple[float, ...] = ()
    data_ranks: Ranks = ()
    """Ranks that FSDP2 shards its models over: each must train on samples of its own."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """One rank after a run. `nan_backward` is the first backward, from 0, of a loss or gradient
    that was not finite, None when there was none (or it lay on a device)."""

    rank: int
    run: int = 0
    host: str = ""
    gpu: str = ""
    """A unique id of its GPU, "" if it uses none."""
    gpus: int = 0
    """How many GPUs it sees."""
    backwards: int = 0
    nan_backward: int | None = None
    nan_what: str = ""
    nan_place: Place | None = None
    replicas: tuple[ReplicaFacts, ...] = ()
    optimizers: tuple[OptimizerFacts, ...] = ()
    samplers: tuple[SamplerFacts, ...] = ()
    loaders: tuple[LoaderFacts, ...] = ()
    works: tuple[WorkFacts, ...] = ()
    functional: FunctionalFacts = field(default_factory=FunctionalFacts)
    collectives: int = 0
    """The number of collectives that it has called, plus one; 0 if unknown."""
    precision: tuple[str, ...] = ()
    """Settings of this process that change what is computed, ``name=value``."""
    sharded_without_optimizer: tuple[int, ...] = ()
    """Sizes of the trained parameters that FSDP2 shards, sorted, where no optimizer has any."""
    split: SplitFacts = field(default_factory=SplitFacts)
    notes: tuple[str, ...] = ()
    """The parts that were omitted, and why."""
    broken: str = ""
    """The error of ours after which this process counts no more."""
    unrecorded: str = ""
    """Why this process records no collectives; empty where it does."""


class StepPart(StrEnum):
    """A part of a training step that a rank spends on its own work."""

    DATA = "data"
    """A DataLoader makes its batch."""
    LOOP = "loop"
    """From the optimizer's step to the forward: the user's own code, other data loading."""
    FORWARD = "forward"
    LOSS = "loss"
    """From the forward to the backward."""
    BACKWARD = "backward"
    AFTER = "after"
    """From the backward to the optimizer's step."""
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True)
class TimedStep:
    """One training step of a rank, from one reduction of gradients to the next. Times in us.

    `number` is that of its last backward in the run. `waited_us` is for how long the rank waited
    in collectives; `queued_us` for how long it was ready to run and had no core, while it did not
    wait. `own_us` has the other times, by `StepPart`.
    """

    number: int
    waited_us: int
    queued_us: int
    own_us: tuple[int, ...]

    @property
    def whole_us(self) -> int:
        """How long it took."""
        return sum(self.own_us) + self.waited_us + self.queued_us


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The newest training steps of a rank. Equal `key`s: they train one model together.

    `cores` are those it may run on. `places` are the lines at which parts of a step begin.
    """

    rank: int
    run: int = 0
    host: str = ""
    cores: tuple[int, ...] = ()
    key: str = ""
    rows: tuple[TimedStep, ...] = ()
    places: Mapping[StepPart, Place] = field(default_factory=dict)
