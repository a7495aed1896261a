"""What a rank reports of its training after a run: replicas, optimizers, samplers.

What should be the same on all ranks can be compared without sending it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ddp_notebook.model.collectives import Place
from ddp_notebook.model.parallel.digests import TensorDigest
from ddp_notebook.model.parallel.split import SplitFacts
from ddp_notebook.model.ranks import Ranks


@dataclass(frozen=True, slots=True)
class WorkFacts:
    """A user line that started collectives and did not wait for all of them.

    Of `issued`, `unwaited` were never waited for, and `met` only by a barrier that came later; the
    tensors of `written` were changed, and those of `stepped` were gradients that an optimizer used,
    before they were waited for.
    """

    operation: str
    issued: int = 0
    unwaited: int = 0
    written: int = 0
    stepped: int = 0
    place: Place | None = None
    met: int = 0


@dataclass(frozen=True, slots=True)
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
    """Of the first direct one."""


@dataclass(frozen=True, slots=True)
class Shards:
    """Parts of tensors (DTensors) that a file has: of `name` and others, sharded over `ranks`.

    `part` is which of `parts` different ones; ranks with the same have copies.
    """

    name: str
    count: int
    ranks: Ranks
    part: int
    parts: int


@dataclass(frozen=True, slots=True)
class SaveFacts:
    """A file that torch.save has written in this run.

    `moments` has for each of the first times how many collectives the rank had called, and one.
    """

    path: str
    moments: tuple[int, ...] = ()
    place: Place | None = None
    """Where it was written first."""
    shards: Shards | None = None
    """The parts of tensors in it; None where all are whole."""


@dataclass(frozen=True, slots=True)
class EvaluationFacts:
    """Forwards of a model without gradients, one after another, with no backward in between.

    `inputs` are hashes of what the first ones got, "" where it could not be read.
    """

    backwards: int
    """How many backwards the rank had begun."""
    forwards: int = 0
    training: bool = False
    """The module was in training mode."""
    loader: bool = False
    """The batches came from a DataLoader that was not trained on."""
    inputs: tuple[str, ...] = ()
    statistics: str = ""
    """A hash of the statistics of batches, "" where there are none or too many."""
    wrote: bool | None = None
    """Something was printed between its begin and the next backward; None where unknown."""
    place: Place | None = None
    padded: tuple[int, int] | None = None
    """A DistributedSampler gave samples twice, and an all_reduce afterwards has counted them: the
    samples of the data set, and those that this rank got."""
    counted: tuple[Place, ...] = ()
    """The user's lines that led to that all_reduce, the outermost first."""
    samples: int = 0
    """How many samples the rank evaluated, by the first dimension of what the model got."""
    summed: tuple[tuple[Place, ...], ...] = ()
    """The same of the first all_reduces of a few values after it."""
    gathered: tuple[Place, ...] = ()
    """The same of all_gathers of a row for each sample, where a sampler gave some twice."""
    weights: str = ""
    """Where there are `statistics`, a hash of some values of the parameters."""


@dataclass(frozen=True, slots=True)
class GradientSample:
    """Some values of a few gradients in one training step, and of their parameters before it.

    A row for each of these parameters: `own` has what the last backward left, `used` what the
    optimizer's step used.
    """

    own: tuple[tuple[float, ...], ...]
    used: tuple[tuple[float, ...], ...]
    weights: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class LossFacts:
    """How the value was computed that a backward began with; only what its graph says.

    It is `factor` times a mean over `count` samples, or over the targets that a cross entropy does
    not ignore; 0 where unknown. `mean` is False where it is not known to be one. Of a cross entropy
    that is a sum, `count` are those targets too.
    """

    factor: float = 1.0
    mean: bool = False
    count: float = 0.0
    place: Place | None = None
    divisor: float = 0.0
    """What a sum was divided by; 0 where it is no sum, or not divided."""
    ignores: bool = False
    """A cross entropy ignored some targets, such as padding: `count` are tokens of the rank's."""


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
class ReplicaFacts:
    """One DistributedDataParallel object. Counts are of this run; equal `key`s are one model.

    A step counts for it when an optimizer has updated parameters of it: `local_steps` with
    gradients of backwards that no_sync covered, `bypassed_steps` of forwards around the
    wrapper, `unready_steps` of backwards in which `unready` parameters got no gradient.
    """

    key: str
    type: str = ""
    """Class of the module inside."""
    name: str = ""
    """The user's variable, "" when there is none."""
    device: str = ""
    backend: str = ""
    group_size: int = 0
    group: Ranks = ()
    """The ranks among which it reduces gradients; none where that is not known any more."""
    begins: tuple[float, ...] = ()
    """Some values of its parameters when it was wrapped; without DDP, at its first forward."""
    find_unused: bool = False
    hook: str = ""
    """A communication hook that may leave replicas apart for a while; "" for none."""
    hooked: tuple[GradientSample, ...] = ()
    """What a hook of the user's was given, and what it left, in the first backwards."""
    broadcast_buffers: bool = True
    forwards: int = 0
    """Through the wrapper, with gradients."""
    no_sync_forwards: int = 0
    """Those of `forwards` under no_sync."""
    bypasses: int = 0
    """Forwards of the module inside that did not come through the wrapper, with gradients."""
    bypass_place: Place | None = None
    local_place: Place | None = None
    """The first forward under no_sync."""
    backwards: int = 0
    evaluating: int = 0
    """Of `backwards`, those of forwards in evaluation mode."""
    steps: int = 0
    local_steps: int = 0
    bypassed_steps: int = 0
    unready_steps: int = 0
    bad_place: Place | None = None
    """The first step of those that used gradients of this rank alone."""
    unready: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    """Parameters that are trained, and that its reducer does not know."""
    buffer_order: tuple[str, ...] = ()
    """In the order in which they are sent."""
    batch_buffers: tuple[str, ...] = ()
    """Statistics of batches: ranks may have others."""
    parameters: tuple[TensorDigest, ...] = ()
    buffers: tuple[TensorDigest, ...] = ()
    constants: tuple[TensorDigest, ...] = ()
    """Tensors that modules hold and that are neither, unchanged since it was wrapped."""
    gradients: tuple[TensorDigest, ...] = ()
    evaluations: tuple[EvaluationFacts, ...] = ()
    """The first ones."""
    starts: tuple[StepStart, ...] = ()
    """Of its first training forwards."""
    loads: int = 0
    """How often load_state_dict was called of it, or of the module inside, once it was wrapped."""
    load_place: Place | None = None
    autocast: str = ""
    """What torch.autocast was in the first of them: ``bfloat16``; "" for off."""
    start_place: Place | None = None
    """Where the first of them was called."""
    matrices: tuple[tuple[TensorDigest, TensorDigest], ...] = ()
    """Without DDP: its parameters of several dimensions before its first step, and some steps
    later."""
    twins: tuple[tuple[str, str], ...] = ()
    """Parameters of one shape in unlike places that had the same values when it was wrapped."""
    unheld: tuple[str, ...] = ()
    """Parameters that get gradients, that no optimizer holds, and that have not changed: a few,
    behind others that an optimizer holds."""
    unregistered: tuple[str, ...] = ()
    """Without DDP: modules in its dicts and lists, which are no parts of it, and are trained."""
    varies: bool = False
    """It has layers that do something else in training mode: dropout, statistics of batches."""


@dataclass(frozen=True, slots=True)
class CopyFacts:
    """A copy of a DDP object's module that ran forwards, and is not trained: an average, a teacher.

    `values` has some values of its parameters at a few of its uses, with how many backwards the
    rank had begun before. One that was loaded is not told.
    """

    type: str = ""
    values: tuple[tuple[int, tuple[float, ...]], ...] = ()
    place: Place | None = None
    """Where it was used first."""


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
    mesh: Ranks = ()
    """Ranks of the default group among which its parameters are sharded; none where they are
    not."""
    factors: tuple[float | None, ...] = ()
    """By what all gradients were multiplied between the backward and the step, of the first steps;
    None where it was no one factor, or not seen."""
    before_scaler: tuple[float | None, ...] = ()
    """The part of it before `GradScaler.step`, which divides by the scale what was not unscaled."""
    pending_steps: int = 0
    """Steps made while a sharded model (FSDP2) still had unreduced gradients."""
    pending_place: Place | None = None
    idle_steps: int = 0
    """Of `steps`, those in which none of its parameters had a gradient."""
    numels: tuple[int, ...] = ()
    """Of its parameters, sorted; none for one with models that had gradients."""
    unheld: tuple[str, ...] = ()
    """Parameters of its models that get gradients, and that no optimizer holds: of as many
    dimensions as the `idle_tensors` that it holds, which are in no model and never get one."""
    idle_tensors: int = 0
    first_gradients: tuple[float, ...] = ()
    """Some values of gradients before its first step; of the parameters: `first_weights`."""
    first_weights: tuple[float, ...] = ()
    samples: tuple[GradientSample, ...] = ()
    """Of its next steps, where no DDP object has its parameters."""
    later: tuple[GradientSample, ...] = ()
    """Of its 16th step, its 32nd, and so on."""
    sampled: tuple[str, ...] = ()
    """Names of the parameters in `samples`."""
    one_hook: bool = False
    """Whether all of them have one function of the user's as a hook on their gradients."""
    last_weights: tuple[float, ...] = ()
    """As `first_weights`, after `watched_steps` steps."""
    span: tuple[int, int] = (0, 0)
    """How many backwards the rank had begun before its first step of this run, and its last."""
    moved_steps: int = 0
    """Of `watched_steps`, those before which its parameters had changed since the last step."""
    begins: tuple[TensorDigest, ...] = ()
    """Of parameters without DDP, before its first step in this process."""
    loads: int = 0
    """How often its load_state_dict was called."""
    load_place: Place | None = None
    windows: tuple[tuple[int, int], ...] = ()
    """How many steps came after so many backwards since the step before: ``(backwards, steps)``."""
    watched_steps: int = 0
    """Steps of which `leftover_steps` were looked for."""
    between: tuple[float | None, ...] = ()
    """By what the gradients that a backward left were multiplied before the next one of the same
    step, in the first steps; None where it was no one factor."""
    leftover_steps: int = 0
    """Of those, made with gradients to which those of the step before were added: never
    cleared, nor changed, in between."""
    options: tuple[str, ...] = ()
    """What else its groups were given, in the first step: ``weight_decay=0.1``."""
    metrics: tuple[float, ...] = ()
    """What its ReduceLROnPlateau was given, the first ones."""
    mixed_steps: int = 0
    """Of `watched_steps`, those with gradients that a backward for another optimizer's step had
    left, through this one's model, and that were not cleared before its own."""


@dataclass(frozen=True, slots=True)
class SamplerFacts:
    """A DistributedSampler that was iterated in this run.

    `epochs` has the epoch of each iteration during which the model was trained, the first ones.
    """

    key: str
    length: int = 0
    """Of the data set."""
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
    workers: int = 0
    batches: tuple[int, ...] = ()
    """For each of `inputs`, how many batches loaders had given by then."""
    by_epoch: str = ""
    """Class of its sampler or stream, where that has a `set_epoch` for another order each epoch."""
    firsts: tuple[str, ...] = ()
    """With `by_epoch`: the first input of each iteration, of the first ones."""


@dataclass(frozen=True, slots=True)
class ParallelFacts:
    """A torch.nn.DataParallel object with which this run has trained, and no DDP object."""

    key: str
    type: str = ""
    """Class of the module inside."""
    devices: int = 0
    """How many GPUs it uses; 0 on CPUs."""
    steps: int = 0
    parameters: tuple[TensorDigest, ...] = ()
    """None if the module no longer exists."""
    place: Place | None = None
    """Where it was called first."""


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
    local_rank: int | None = None
    """LOCAL_RANK, as its environment has it."""
    backwards: int = 0
    nan_backward: int | None = None
    nan_what: str = ""
    nan_place: Place | None = None
    losses: tuple[LossFacts, ...] = ()
    """Of the first backwards."""
    nan_losses: int = 0
    """How many of the last losses were not a number, one after the other."""
    nan_gradients: int = 0
    """In how many of the last backwards a gradient of its own was not a number."""
    skipped: int = 0
    """How often `GradScaler.step` was called since an optimizer made a step."""
    skipped_place: Place | None = None
    replicas: tuple[ReplicaFacts, ...] = ()
    evaluated: tuple[ReplicaFacts, ...] = ()
    """The DDP objects that were used without gradients alone, and where nothing was trained,
    models without DDP; only how they were used."""
    optimizers: tuple[OptimizerFacts, ...] = ()
    copies: tuple[CopyFacts, ...] = ()
    """In the order of their first use."""
    plain: tuple[ReplicaFacts, ...] = ()
    """Models that an optimizer trains and no DDP object contains; only how they were used."""
    samplers: tuple[SamplerFacts, ...] = ()
    loaders: tuple[LoaderFacts, ...] = ()
    parallels: tuple[ParallelFacts, ...] = ()
    works: tuple[WorkFacts, ...] = ()
    functional: FunctionalFacts = FunctionalFacts()
    saves: tuple[SaveFacts, ...] = ()
    collectives: int = 0
    """The number of collectives that it has called, plus one; 0 if unknown."""
    precision: tuple[str, ...] = ()
    """Settings of this process that change what is computed, ``name=value``."""
    sharded_without_optimizer: tuple[int, ...] = ()
    """Sizes of the trained parameters that FSDP2 shards, sorted, where no optimizer has any."""
    split: SplitFacts = field(default_factory=SplitFacts)
    notes: tuple[str, ...] = ()
    """What was omitted, and why."""
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
