"""Meanings of torch's errors, and which of them only report another rank's fault."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ddp_notebook.diagnosis import catalogue
from ddp_notebook.diagnosis.majority import by_ranks, minority
from ddp_notebook.diagnosis.progress import (
    differing_variables,
    in_setup,
    raised_words,
    way_to_error,
)
from ddp_notebook.diagnosis.training.replicas import named
from ddp_notebook.model import Activity, Case, Category, Finding, RankReport, Ranks, cut


@dataclass(frozen=True)
class Meaning:
    """The kind of finding of errors whose text matches `pattern`."""

    pattern: re.Pattern[str]
    kind: str

    def found(self, match: re.Match[str]) -> str:
        """Return the first group of a match: the value that the error names, or nothing."""
        return cut(next(filter(None, match.groups()), "").strip(), 60)


def _meaning(pattern: str, kind: str) -> Meaning:
    return Meaning(re.compile(pattern, re.IGNORECASE | re.DOTALL), kind)


MEANINGS = (
    _meaning(
        r"\bno (?:free|available|unused) ports?\b([^\n]*)|ports? exhausted",
        "port-exhausted.none-free",
    ),
    _meaning(r"EADDRINUSE|address already in use", "port-in-use.held"),
    _meaning(
        r"Unable to find address for: (\S+)|[Uu]nable to find interface (\S+)",
        "wrong-interface.unknown-interface",
    ),
    _meaning(r"environment variable (\w+) expected, but not set", "env-invalid.not-set"),
    _meaning(r"invalid literal for int\(\) with base 10: (\S+)", "env-invalid.not-a-number"),
    _meaning(
        r"port must have value from 0 to 65535 but was (\d+)",
        "env-invalid.port-out-of-range",
    ),
    _meaning(
        r"rank < size\D*([\d vs.]+\d)|rank .{0,40}must be (?:less|smaller)",
        "env-invalid.too-high",
    ),
    _meaning(r"doesn't have (\w+) built in", "backend-device-mismatch.not-built-in"),
    _meaning(
        r"ProcessGroupNCCL is only supported with GPUs, no GPUs found",
        "backend-device-mismatch.nccl-without-gpu",
    ),
    # https://github.com/karpathy/nanoGPT/issues/281, https://github.com/pytorch/pytorch/issues/1040
    _meaning(
        r"Torch not compiled with CUDA enabled|Found no NVIDIA driver|No CUDA GPUs are available"
        r"|module 'torch\._C' has no attribute '_cuda_|dummy base class \w*[Cc]uda"
        r"|Cannot access accelerator device when none is available|requires CUDA support"
        r"|no CUDA-capable device is detected"
        r"|object on a CUDA device but torch\.cuda\.is_available\(\) is False",
        "backend-device-mismatch.no-cuda",
    ),
    # https://github.com/NVIDIA/Megatron-LM/issues/661
    _meaning(r"Duplicate GPU detected ?:? ?([^\n]*)", "gpu-mapping.one-gpu-twice"),
    # https://github.com/tatsu-lab/stanford_alpaca/issues/67
    _meaning(r"invalid device ordinal", "gpu-mapping.no-such-gpu"),
    # https://github.com/pyg-team/pytorch_geometric/issues/10101
    _meaning(
        r"CUDA error: (device-side assert triggered|an illegal memory access was encountered"
        r"|unspecified launch failure|misaligned address)",
        "exception-on-one-rank.gpu-failed",
    ),
    # https://github.com/huggingface/accelerate/issues/1192 (ECC),
    # https://github.com/pytorch/pytorch/issues/58155 (NVLink),
    # https://github.com/pytorch/pytorch/issues/43685 (lost)
    _meaning(
        r"(uncorrectable (?:ECC|NVLink) error|hardware stack error|GPU is lost|fallen off the bus)",
        "exception-on-one-rank.gpu-hardware-error",
    ),
    # https://github.com/lllyasviel/Omost/issues/120
    _meaning(
        r"NVIDIA driver on your system is too old \(found version (\d+)\)"
        r"|CUDA driver version is insufficient",
        "version-mismatch.old-driver",
    ),
    # https://github.com/NVIDIA/nccl/issues/1837,
    # https://github.com/marin-community/marin/issues/6940
    _meaning(
        r"no socket interface found|with family \d+ is neither AF_INET",
        "wrong-interface.nccl-finds-none",
    ),
    # https://github.com/ray-project/ray_lightning/issues/24
    _meaning(
        r"peer access is not supported between these two devices", "gpu-mapping.no-peer-access"
    ),
    # https://github.com/NVIDIA/nccl/issues/473, https://github.com/NVIDIA/nccl/issues/342
    _meaning(
        r"unhandled system error|ncclSystemError|(?:creating|attaching to) shared memory segment",
        "resource-starved.nccl-system-call",
    ),
    _meaning(
        r"Unknown backend type (\S+)|Invalid backend: '?([^'\s]+)",
        "env-invalid.unknown-backend",
    ),
    _meaning(r"initialize the default process group twice", "double-init.called-again"),
    # https://github.com/awslabs/keys_values/issues/92: three of the others are ranks of the job
    _meaning(
        r"CUDA out of memory.*?Process \d+ has [\d.]+ \wiB memory in use",
        "oom-on-one-rank.gpu-shared",
    ),
    _meaning(
        r"can't allocate memory|out of memory|cannot allocate memory|DefaultCPUAllocator",
        "oom-on-one-rank.out-of-memory",
    ),
    # https://github.com/pytorch/pytorch/issues/5040
    _meaning(r"worker \(pid \d+\) is killed by signal: Bus error", "dataloader-shm.shm-full"),
    # https://github.com/pytorch/pytorch/issues/8976
    _meaning(
        r"worker \(pid \d+\) is killed by signal: (Killed)",
        "exception-on-one-rank.worker-killed",
    ),
    _meaning(r"Too many open files", "resource-starved.open-files"),
    _meaning(r"permission denied|read-only file system", "filesystem.no-permission"),
    _meaning(
        r"expects same model across all ranks|appears not to match sizes|"
        r"inconsistent \d+ params|different number of parameters",
        "param-mismatch.ddp-refused",
    ),
    _meaning(
        r"Expected to have finished reduction in the prior iteration",
        "unused-params.no-gradient",
    ),
    _meaning(r"Expected to mark a variable ready only once", "checkpoint-reentrant.marked-twice"),
    _meaning(r"Your training graph has changed in this iteration", "unused-params.graph-changed"),
    _meaning(r"expect_autograd_hooks_ INTERNAL ASSERT", "no-sync-misuse.before-the-first"),
    _meaning(
        r"Split sizes (?:doesn't|does not|do not) match total dim 0 size",
        "split-mismatch.own-sizes",
    ),
    _meaning(r"Global rank (\d+) is not part of group", "subgroup-misuse.not-a-member"),
    _meaning(
        r"No backend type associated with device type (\w+)",
        "backend-device-mismatch.no-backend",
    ),
)

TIMED_OUT = re.compile(
    r"timed? ?out|did not join within|did not answer within|failed to pass monitoredBarrier",
    re.IGNORECASE,
)
_VICTIM = re.compile(
    rf"{TIMED_OUT.pattern}|Connection (closed|reset)|connectFullMesh|aborted \(%ddp_abort|given up"
    r"|Broken pipe|clients joined|failed to recv|pair closure|remote process exited|Socket closed",
    re.IGNORECASE,
)
"""Errors of a rank that only waited: the mistake is elsewhere. Of ours some have no other mark."""
NO_GROUP = re.compile(r"Default process group has not been initialized")
"""There is no default group: it was destroyed, or never made."""
WENT_AWAY = re.compile(
    r"gloo.*Connection (closed|reset) by peer|remote process exited", re.IGNORECASE | re.DOTALL
)
"""Of these, errors of a backend about a rank that was there and is gone."""
STORE_WENT_AWAY = re.compile(
    r"Connection was likely closed|recvVector failed|sendBytes failed|Broken pipe"
)
"""Errors of a store's client whose host process is gone."""


def is_of_others(text: str) -> bool:
    """True of an error that says no more than that others went away, or were waited for."""
    return bool(_VICTIM.search(text))


def is_victim(e: RankReport) -> bool:
    """True when a rank's error only says that it waited, or that others went away."""
    own = e.error.category or any(meaning.pattern.search(e.error.text) for meaning in MEANINGS)
    return not own and e.error.type not in _OF_PYTHON and is_of_others(e.error.text)


_OF_PYTHON = ("ConnectionResetError", "BrokenPipeError", "ConnectionAbortedError")
"""Of connections that Python made, as to a DataLoader's worker: torch's errors have other types."""


def lacks_group(e: RankReport) -> bool:
    """True of a rank that failed because it has no group, and never called for one."""
    failed = e.activity is Activity.FAILED and NO_GROUP.search(e.error.text)
    return bool(failed) and not (e.entered or e.initialized)


@dataclass(frozen=True)
class _Reading:
    """The kind of an error, with its facts; of what a rank says itself, the category alone."""

    kind: str
    facts: tuple[tuple[str, Any], ...] = ()

    @property
    def category(self) -> Category:
        return Category(self.kind.partition(".")[0])

    def finding(
        self,
        ranks: Ranks,
        waiting: Ranks,
        evidence: tuple[str, ...],
        unready: Sequence[tuple[str, ...]],
    ) -> Finding:
        """Make the finding of these ranks; `unready` are each one's parameters without gradient."""
        facts = dict(self.facts)
        if "." not in self.kind:
            return Finding(self.category, ranks, waiting=waiting, evidence=evidence, **facts)
        alike = len(set(unready)) == 1  # else the evidence has those of each rank
        if self.kind == "unused-params.no-gradient" and alike and unready[0]:
            return catalogue.finding(
                "unused-params.no-gradient-for",
                ranks,
                waiting=waiting,
                evidence=evidence,
                names=named(unready[0]),
            )
        return catalogue.finding(self.kind, ranks, waiting=waiting, evidence=evidence, **facts)


def _said_alike(case: Case, *, invalid: bool) -> Iterable[tuple[_Reading, list[RankReport]]]:
    """The errors that say the same, with what the first of them means."""
    same: dict[object, tuple[_Reading, list[RankReport]]] = {}
    stores = {e.rank: e.arguments.master_port for e in case.callers if e.arguments.hosts_store}
    for e in case.ranks:
        reading = _read(e, case) if e.activity is Activity.FAILED else None
        if reading is None or (reading.category is Category.ENV_INVALID) != invalid:
            continue
        others = {**stores, e.rank: -1}.values()
        if reading.category is Category.PORT_IN_USE and e.arguments.master_port in others:
            continue  # it is no stranger's: another rank of this job hosts its store there
        # One line may say of each rank another value: that is one mistake all the same.
        at = e.error.at if reading.category is Category.EXCEPTION_ON_ONE_RANK else ()
        key: object = (e.error.type, reading.kind, at) if at else reading
        same.setdefault(key, (reading, []))[1].append(e)
    return same.values()


def of_errors(
    case: Case,
    *,
    invalid: bool,
    only: Collection[int] | None = None,
    waiting: Ranks | None = None,
    facts: tuple[str, ...] = (),
) -> Iterator[Finding]:
    """Findings from ranks' own errors: of `invalid` values, or all but these.

    Ranks that say the same share one. The culprits are `only` these ranks, if given; `waiting` are
    by default all that wait.
    """
    for reading, failed in _said_alike(case, invalid=invalid):
        category = reading.category
        odd = _other_model(failed) if category is Category.PARAM_MISMATCH else failed
        ranks = tuple(e.rank for e in odd if only is None or e.rank in only)
        if ranks:
            yield reading.finding(
                ranks,
                case.where(Activity.WAITING) if waiting is None else waiting,
                (
                    *by_ranks({e.rank: _said(e, category) for e in failed}),
                    *differing_variables(failed),
                    *(f"the port is held{e.error.holder}" for e in odd if e.error.holder),
                    *facts,
                ),
                [*map(_without_gradient, odd)],
            )


def _without_gradient(e: RankReport) -> tuple[str, ...]:
    """Return the parameters that got no gradient on a rank; the error has only their numbers."""
    return tuple(dict.fromkeys(name for replica in e.parts.replicas for name in replica.unready))


_PARAMETERS = re.compile(r"Rank \d+ has (\d+) params", re.IGNORECASE)


def _other_model(failed: list[RankReport]) -> list[RankReport]:
    """Of ranks that all got the error that models differ, those whose own differs from most.

    Each error has the number of the rank's own parameters. Without that, all.
    """
    own = {e.rank: _PARAMETERS.search(e.error.text) for e in failed}
    values = {rank: match[1] for rank, match in own.items() if match}
    ranks = minority(values) if len(values) == len(failed) else ()
    return [e for e in failed if e.rank in ranks] or failed


def _read(e: RankReport, case: Case) -> _Reading | None:
    """Return the meaning of a rank's error; None when it is only a victim."""
    if e.error.category in set(Category):  # a saved run may come from a later version
        own = ("cause", first_line(e).rstrip(".")), ("remedy", e.error.remedy)
        return _Reading(e.error.category, own)
    line = e.error.at[-1].text if e.error.at else ""
    for meaning in MEANINGS:
        match = meaning.pattern.search(e.error.text)
        if match and (not meaning.kind.startswith("env-invalid") or _ENVIRONMENT.search(line)):
            return _Reading(meaning.kind, (("found", _holders(e, case) or meaning.found(match)),))
    if e.error.type == "MemoryError":
        return _Reading("oom-on-one-rank.out-of-memory")
    if e.error.type not in _OF_PYTHON and _VICTIM.search(e.error.text):
        return _gave_up_first(e, case)
    return _raised_own(e, case)


def _holders(e: RankReport, case: Case) -> str:
    """Return who else holds the memory of a rank's GPU, by torch's own words about it."""
    # In a container the driver may count processes otherwise: then no rank has such a number.
    ranks = {
        other.process.pid: f"rank {other.rank}"
        for other in case.ranks
        if other.network.host == e.network.host
    }
    words = re.findall(r"Process (\d+) has ([\d.]+ \wiB) memory in use", e.error.text)
    return ", ".join(f"{ranks.get(int(pid)) or f'process {pid}'} {size}" for pid, size in words)


def _raised_own(e: RankReport, case: Case) -> _Reading | None:
    """Read an error of the user's code; None where it is said elsewhere, or no rank waits."""
    if lacks_group(e) and any(map(in_setup, case.ranks)):
        return None  # that it did not call for one as the others did is said of it elsewhere
    if e.error.type == "KeyboardInterrupt":
        return None  # the user's own doing
    gave_up = any(e.activity is Activity.FAILED and is_victim(e) for e in case.ranks)
    if not case.where(Activity.WAITING) and not gave_up:
        return None  # no rank was waiting for it: the error speaks for itself
    words = raised_words(e.error.type, e.error.text, e.error.at)
    kind = _BY_TYPE.get(e.error.type, "exception-on-one-rank.raised")
    return _Reading(kind, (("error", words),))


_BY_TYPE = {
    # https://github.com/pytorch/pytorch/issues/72099
    "SystemExit": "exception-on-one-rank.left",
    # https://github.com/huggingface/datasets/issues/6623
    "StopIteration": "exception-on-one-rank.ran-out",
}
"""The kinds of errors that are no mistake of the line that raised them."""


_ENVIRONMENT = re.compile(r"^$|init_process_group|environ|getenv|RANK|WORLD|PORT")
"""Lines of the user's that may have set what is invalid; also a line that is not known."""


def _said(e: RankReport, category: Category) -> str:
    """A rank's error as evidence; one that no pattern knows, as the lines that it passed."""
    if category is Category.UNUSED_PARAMS and (unready := _without_gradient(e)):
        return cut(f"no gradient for {', '.join(unready)}", 300)
    if category is Category.BACKEND_DEVICE_MISMATCH and e.error.at:
        return f"{way_to_error(e.error.at)}: {first_line(e)}"
    if category is not Category.EXCEPTION_ON_ONE_RANK or not e.error.at:
        return first_line(e)
    return way_to_error(e.error.at)


def _gave_up_first(e: RankReport, case: Case) -> _Reading | None:
    """A rank whose timeout is shorter than the others' gave up on a rank that is only late."""
    mine = e.arguments.timeout_s
    longest = max(other.arguments.timeout_s or 0.0 for other in case.ranks)
    for other in case.ranks:
        never_ran = other.activity is Activity.IDLE and not other.entered
        if other.activity is Activity.DEAD or never_ran:
            return None  # that one will not come at all, however long it is waited for
    if mine is None or longest <= mine or not TIMED_OUT.search(e.error.text):
        return None
    return _Reading("env-mismatch.gave-up-first", (("own_s", mine), ("longest_s", longest)))


def first_line(e: RankReport) -> str:
    """The first line of a rank's error, or its type."""
    lines = e.error.text.strip().splitlines()
    return cut(lines[0], 300) if lines else e.error.type
