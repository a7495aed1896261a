"""Meanings of torch's errors, and which of them only report another rank's fault."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from ddp_notebook.diagnosis.majority import by_ranks, minority
from ddp_notebook.diagnosis.progress import (
    differing_variables,
    in_setup,
    raised_words,
    way_to_error,
)
from ddp_notebook.model import Activity, Case, Category, Finding, RankReport, Ranks, cut


@dataclass(frozen=True)
class Meaning:
    """The meaning of errors whose text matches `pattern`; ``{0}`` is the first group of that."""

    pattern: re.Pattern[str]
    category: Category
    cause: str
    remedy: str

    def words(self, match: re.Match[str]) -> tuple[str, str]:
        """Return the cause and the remedy, with the first group of the match."""
        group = next(filter(None, match.groups()), "")
        return self.cause.format(group).removesuffix(" ()"), self.remedy.format(group)


def _meaning(pattern: str, category: Category, cause: str, remedy: str) -> Meaning:
    return Meaning(re.compile(pattern, re.IGNORECASE | re.DOTALL), category, cause, remedy)


_AS_IT_IS = "to run it on CPUs as it is: %ddp_run --cpu (for a cell %%ddp --cpu)"
MEANINGS = (
    _meaning(
        r"\bno (?:free|available|unused) ports?\b([^\n]*)|ports? exhausted",
        Category.PORT_EXHAUSTED,
        "found no free port where it may look{0}",
        "Free a port of the range, or widen it; or ask the system for a port (bind to port 0) on "
        "one process, and give its number to all ranks",
    ),
    _meaning(
        r"EADDRINUSE|address already in use",
        Category.PORT_IN_USE,
        "MASTER_PORT is held by another process on the master's host",
        "Free the port, or give the job a MASTER_PORT of its own",
    ),
    _meaning(
        r"Unable to find address for: (\S+)|[Uu]nable to find interface (\S+)",
        Category.WRONG_INTERFACE,
        "GLOO_SOCKET_IFNAME names {0}, which is no interface of its host",
        "Unset GLOO_SOCKET_IFNAME, or name an interface that exists",
    ),
    _meaning(
        r"environment variable (\w+) expected, but not set",
        Category.ENV_INVALID,
        "{0} is not set",
        "Set {0}, or start the script with a launcher that does (%ddp_run, torchrun)",
    ),
    _meaning(
        r"invalid literal for int\(\) with base 10: (\S+)",
        Category.ENV_INVALID,
        "{0} is given where a number must be (RANK, WORLD_SIZE or MASTER_PORT)",
        "Set RANK, WORLD_SIZE and MASTER_PORT to numbers",
    ),
    _meaning(
        r"port must have value from 0 to 65535 but was (\d+)",
        Category.ENV_INVALID,
        "MASTER_PORT is {0}: ports are 1 to 65535",
        "Set MASTER_PORT to a port from 1024 to 65535",
    ),
    _meaning(
        r"rank < size\D*([\d vs.]+\d)|rank .{0,40}must be (?:less|smaller)",
        Category.ENV_INVALID,
        "RANK is not below WORLD_SIZE ({0})",
        "Ranks are 0 to WORLD_SIZE - 1",
    ),
    _meaning(
        r"doesn't have (\w+) built in",
        Category.BACKEND_DEVICE_MISMATCH,
        "the backend is {0}, which the torch that is installed here was built without",
        "Use init_process_group('gloo') on CPUs; {0} needs another build of torch; or, "
        f"{_AS_IT_IS}",
    ),
    _meaning(
        r"ProcessGroupNCCL is only supported with GPUs, no GPUs found",
        Category.BACKEND_DEVICE_MISMATCH,
        "the backend is NCCL, and this process sees no GPU",
        "Use init_process_group('gloo') on CPUs; or let the process see a GPU "
        f"(CUDA_VISIBLE_DEVICES); or, {_AS_IT_IS}",
    ),
    # https://github.com/karpathy/nanoGPT/issues/281, https://github.com/pytorch/pytorch/issues/1040
    _meaning(
        r"Torch not compiled with CUDA enabled|Found no NVIDIA driver|No CUDA GPUs are available"
        r"|module 'torch\._C' has no attribute '_cuda_|dummy base class \w*[Cc]uda"
        r"|Cannot access accelerator device when none is available|requires CUDA support"
        r"|no CUDA-capable device is detected"
        r"|object on a CUDA device but torch\.cuda\.is_available\(\) is False",
        Category.BACKEND_DEVICE_MISMATCH,
        "CUDA is asked for, and this process has no GPU that torch can use",
        f"Use the device 'cpu'; or, {_AS_IT_IS}",
    ),
    # https://github.com/NVIDIA/Megatron-LM/issues/661
    _meaning(
        r"Duplicate GPU detected ?:? ?([^\n]*)",
        Category.GPU_MAPPING,
        "two ranks use one GPU, which NCCL refuses ({0})",
        "Give each rank a GPU of its own before init_process_group: "
        "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])); with fewer GPUs than ranks use gloo",
    ),
    # https://github.com/tatsu-lab/stanford_alpaca/issues/67
    _meaning(
        r"invalid device ordinal",
        Category.GPU_MAPPING,
        "it chooses a GPU whose number its process does not see",
        "Start at most as many ranks on a host as it has GPUs, and choose by LOCAL_RANK, not RANK; "
        "CUDA_VISIBLE_DEVICES numbers the GPUs again, from 0",
    ),
    # https://github.com/pyg-team/pytorch_geometric/issues/10101
    _meaning(
        r"CUDA error: (device-side assert triggered|an illegal memory access was encountered"
        r"|unspecified launch failure|misaligned address)",
        Category.EXCEPTION_ON_ONE_RANK,
        "its GPU failed ({0}), and no CUDA call of this process works any more",
        "Replace the process (%ddp_restart). The line that is shown is where it was noticed: "
        "CUDA_LAUNCH_BLOCKING=1 in the environment shows the one that failed, most often an index "
        "out of range",
    ),
    # https://github.com/huggingface/accelerate/issues/1192 (ECC),
    # https://github.com/pytorch/pytorch/issues/58155 (NVLink),
    # https://github.com/pytorch/pytorch/issues/43685 (lost)
    _meaning(
        r"(uncorrectable (?:ECC|NVLink) error|hardware stack error|GPU is lost|fallen off the bus)",
        Category.EXCEPTION_ON_ONE_RANK,
        "its GPU has a hardware error ({0}), and no CUDA call of this process works any more",
        "Replace the process (%ddp_restart), and take the GPU out of use (%ddp_init --gpus): "
        "`nvidia-smi -q -d ECC` and `sudo dmesg | grep Xid` show its state, a reset may clear it",
    ),
    # https://github.com/lllyasviel/Omost/issues/120
    _meaning(
        r"NVIDIA driver on your system is too old \(found version (\d+)\)"
        r"|CUDA driver version is (insufficient)",
        Category.VERSION_MISMATCH,
        "NVIDIA's driver on its host is too old for this build of torch ({0})",
        "Install a newer driver there, or a torch that was built for an older CUDA",
    ),
    # https://github.com/NVIDIA/nccl/issues/1837,
    # https://github.com/marin-community/marin/issues/6940
    _meaning(
        r"no socket interface found|with family \d+ is neither AF_INET",
        Category.WRONG_INTERFACE,
        "NCCL found no network interface that it may use (NCCL_SOCKET_IFNAME)",
        "Unset NCCL_SOCKET_IFNAME, or name an interface that is up on this host (`ip addr` lists "
        "them; it may differ between hosts)",
    ),
    # https://github.com/ray-project/ray_lightning/issues/24
    _meaning(
        r"peer access is not supported between these two devices",
        Category.GPU_MAPPING,
        "its GPU may not read the memory of another rank's GPU directly (P2P), and NCCL tried to",
        "NCCL_P2P_DISABLE=1 in the environment of all ranks has NCCL go through the hosts' memory; "
        "`nvidia-smi topo -p2p r` shows which GPUs may",
    ),
    # https://github.com/NVIDIA/nccl/issues/473, https://github.com/NVIDIA/nccl/issues/342
    _meaning(
        r"unhandled system error|ncclSystemError|(?:creating|attaching to) shared memory segment",
        Category.RESOURCE_STARVED,
        "a system call of NCCL's failed: for shared memory, a socket or memory",
        "In a container give it a larger /dev/shm (docker run --shm-size=8g, or --ipc=host); "
        "NCCL_DEBUG=WARN in the environment says which call it was",
    ),
    _meaning(
        r"Unknown backend type (\S+)|Invalid backend: '?([^'\s]+)",
        Category.ENV_INVALID,
        "torch knows no backend {0}",
        "Use 'gloo' on CPUs, 'nccl' on NVIDIA GPUs",
    ),
    _meaning(
        r"initialize the default process group twice",
        Category.DOUBLE_INIT,
        "init_process_group is called, and there is a group already",
        "Call it once, or dist.destroy_process_group() before",
    ),
    # https://github.com/awslabs/keys_values/issues/92: three of the others are ranks of the job
    _meaning(
        r"CUDA out of memory.*?Process \d+ has [\d.]+ \wiB memory in use",
        Category.OOM_ON_ONE_RANK,
        "its GPU has no memory left, of which others hold a part",
        "End what is not of this job (nvidia-smi lists it), or give the rank another GPU; a rank "
        "stays on its own with torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before all "
        "else of CUDA",
    ),
    _meaning(
        r"can't allocate memory|out of memory|cannot allocate memory|DefaultCPUAllocator",
        Category.OOM_ON_ONE_RANK,
        "it ran out of memory",
        "Give it more memory, or a smaller model or batch",
    ),
    # https://github.com/pytorch/pytorch/issues/5040
    _meaning(
        r"worker \(pid \d+\) is killed by signal: Bus error",
        Category.DATALOADER_SHM,
        "a worker of its DataLoader was killed as /dev/shm was full (SIGBUS)",
        "Give the container a larger /dev/shm (docker run --shm-size=8g, or --ipc=host), or use "
        "fewer workers or smaller batches",
    ),
    # https://github.com/pytorch/pytorch/issues/8976
    _meaning(
        r"worker \(pid \d+\) is killed by signal: (Killed)",
        Category.EXCEPTION_ON_ONE_RANK,
        "a worker of its DataLoader was killed (SIGKILL), as the kernel does for lack of memory",
        "Look at `dmesg` for the kernel's OOM killer; use fewer workers, or load less in each",
    ),
    _meaning(
        r"Too many open files",
        Category.RESOURCE_STARVED,
        "its process may open no more files: each open file, pipe and socket counts",
        "Close what is open, allow more (ulimit -n), or have the workers of a DataLoader share "
        "tensors by name: torch.multiprocessing.set_sharing_strategy('file_system')",
    ),
    _meaning(
        r"[Pp]ermission denied|Read-only file system",
        Category.FILESYSTEM,
        "it may not write where it must",
        "Use a path that every rank may write",
    ),
    _meaning(
        r"expects same model across all ranks|appears not to match sizes|"
        r"inconsistent \d+ params|different number of parameters",
        Category.PARAM_MISMATCH,
        "the model that DDP got there differs from the other ranks' models",
        "Build the same model on every rank",
    ),
    _meaning(
        r"Expected to have finished reduction in the prior iteration",
        Category.UNUSED_PARAMS,
        "a parameter of the model got no gradient in the last step, so a bucket was never reduced",
        "Use every parameter in forward, or give DistributedDataParallel "
        "find_unused_parameters=True",
    ),
    _meaning(
        r"Expected to mark a variable ready only once",
        Category.CHECKPOINT_REENTRANT,
        "a parameter got its gradient more than once in a backward: reentrant checkpointing, or "
        "one module in two checkpointed parts",
        "Use checkpoint(..., use_reentrant=False); or static_graph=True in "
        "DistributedDataParallel where each step has the same graph",
    ),
    _meaning(
        r"Your training graph has changed in this iteration",
        Category.UNUSED_PARAMS,
        "a step used other parameters than the first one did, and static_graph=True promises "
        "that none does",
        "Use the same parameters in each step (the first inside of no_sync() counts too), or "
        "leave static_graph=True out",
    ),
    _meaning(
        r"expect_autograd_hooks_ INTERNAL ASSERT",
        Category.NO_SYNC_MISUSE,
        "a backward under no_sync() came before the first one that reduces, and "
        "static_graph=True learns the graph in the first",
        "Leave static_graph=True out, or begin with a step outside of no_sync()",
    ),
    _meaning(
        r"Split sizes (?:doesn't|does not|do not) match total dim 0 size",
        Category.SPLIT_MISMATCH,
        "the split sizes that it gives to all_to_all do not add up to the rows of its tensor",
        "Make the splits of the very tensor that is sent: sum(input_split_sizes) == len(input)",
    ),
    _meaning(
        r"Global rank (\d+) is not part of group",
        Category.SUBGROUP_MISUSE,
        "a collective of a smaller group names rank {0}, which is not in that group, as src= or "
        "dst=: that is a rank of the whole job, not of the group",
        "Count in the group: group_src= or group_dst=; or translate the rank first: "
        "dist.get_global_rank(group, number)",
    ),
    _meaning(
        r"No backend type associated with device type (\w+)",
        Category.BACKEND_DEVICE_MISMATCH,
        "a tensor is on {0}, for which the group has no backend",
        "Move the tensor, or use a backend for its device",
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


def _said_alike(
    case: Case, *, invalid: bool
) -> Iterable[tuple[tuple[Category, str, str], list[RankReport]]]:
    """The errors that say the same, with what the first of them means."""
    same: dict[object, tuple[tuple[Category, str, str], list[RankReport]]] = {}
    stores = {e.rank: e.arguments.master_port for e in case.callers if e.arguments.hosts_store}
    for e in case.ranks:
        meaning = _read(e, case) if e.activity is Activity.FAILED else None
        if meaning is None or (meaning[0] is Category.ENV_INVALID) != invalid:
            continue
        others = {**stores, e.rank: -1}.values()
        if meaning[0] is Category.PORT_IN_USE and e.arguments.master_port in others:
            continue  # it is no stranger's: another rank of this job hosts its store there
        # One line may say of each rank another value: that is one mistake all the same.
        at = e.error.at if meaning[0] is Category.EXCEPTION_ON_ONE_RANK else ()
        key: object = (e.error.type, meaning[2], at) if at else meaning
        same.setdefault(key, (meaning, []))[1].append(e)
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
    for (category, cause, remedy), failed in _said_alike(case, invalid=invalid):
        odd = _other_model(failed) if category is Category.PARAM_MISMATCH else failed
        ranks = tuple(e.rank for e in odd if only is None or e.rank in only)
        if ranks:
            yield Finding(
                category,
                ranks,
                cause,
                remedy,
                case.where(Activity.WAITING) if waiting is None else waiting,
                (
                    *by_ranks({e.rank: _said(e, category) for e in failed}),
                    *differing_variables(failed),
                    *(f"the port is held{e.error.holder}" for e in odd if e.error.holder),
                    *facts,
                ),
            )


_PARAMETERS = re.compile(r"Rank \d+ has (\d+) params", re.IGNORECASE)


def _other_model(failed: list[RankReport]) -> list[RankReport]:
    """Of ranks that all got the error that models differ, those whose own differs from most.

    Each error has the number of the rank's own parameters. Without that, all.
    """
    own = {e.rank: _PARAMETERS.search(e.error.text) for e in failed}
    values = {rank: match[1] for rank, match in own.items() if match}
    ranks = minority(values) if len(values) == len(failed) else ()
    return [e for e in failed if e.rank in ranks] or failed


def _read(e: RankReport, case: Case) -> tuple[Category, str, str] | None:
    """Category, cause and remedy of a rank's error; None when it is only a victim."""
    if e.error.category in set(Category):  # a saved run may come from a later version
        return Category(e.error.category), first_line(e).rstrip("."), e.error.remedy
    line = e.error.at[-1].text if e.error.at else ""
    for meaning in MEANINGS:
        match = meaning.pattern.search(e.error.text)
        may_be = meaning.category is not Category.ENV_INVALID or _ENVIRONMENT.search(line)
        if match and may_be:
            cause, remedy = meaning.words(match)
            return meaning.category, f"{cause}{_holders(e, case)}", f"{remedy}."
    if e.error.type == "MemoryError":
        return Category.OOM_ON_ONE_RANK, "it ran out of memory", "Give it more memory."
    if e.error.type not in _OF_PYTHON and _VICTIM.search(e.error.text):
        return _gave_up_first(e, case)
    return _raised_own(e, case)


def _holders(e: RankReport, case: Case) -> str:
    """Return who else holds the memory of a rank's GPU, by torch's own words about it."""
    # In a container the driver may count processes otherwise: then no rank has such a number.
    ranks = {other.process.pid: f"rank {other.rank}" for other in case.ranks}
    words = re.findall(r"Process (\d+) has ([\d.]+ \wiB) memory in use", e.error.text)
    held = [f"{ranks.get(int(pid)) or f'process {pid}'} {size}" for pid, size in words]
    return f" ({', '.join(held)})" if held else ""


def _raised_own(e: RankReport, case: Case) -> tuple[Category, str, str] | None:
    """Read an error of the user's code; None where it is said elsewhere, or no rank waits."""
    if lacks_group(e) and any(map(in_setup, case.ranks)):
        return None  # that it did not call for one as the others did is said of it elsewhere
    if e.error.type == "KeyboardInterrupt":
        return None  # the user's own doing
    gave_up = any(e.activity is Activity.FAILED and is_victim(e) for e in case.ranks)
    if not case.where(Activity.WAITING) and not gave_up:
        return None  # no rank was waiting for it: the error speaks for itself
    return (
        Category.EXCEPTION_ON_ONE_RANK,
        f"raised {raised_words(e.error.type, e.error.text, e.error.at)}",
        _BY_TYPE.get(e.error.type, "Correct the error there; the others wait for it."),
    )


_BY_TYPE = {
    # https://github.com/pytorch/pytorch/issues/72099
    "SystemExit": "Where one rank may have to end, let all ranks decide it together (all_reduce a "
    "flag), and end together.",
    # https://github.com/huggingface/datasets/issues/6623
    "StopIteration": "Its iterator had no more to give: give every rank as many batches, or use "
    "next(iterator, None) and let all ranks decide together to stop (all_reduce a flag).",
}
"""Remedies for errors that are no mistake of the line that raised them."""


_ENVIRONMENT = re.compile(r"^$|init_process_group|environ|getenv|RANK|WORLD|PORT")
"""Lines of the user's that may have set what is invalid; also a line that is not known."""


def _said(e: RankReport, category: Category) -> str:
    """A rank's error as evidence; one that no pattern knows, as the lines that it passed."""
    if category is Category.BACKEND_DEVICE_MISMATCH and e.error.at:
        return f"{way_to_error(e.error.at)}: {first_line(e)}"
    if category is not Category.EXCEPTION_ON_ONE_RANK or not e.error.at:
        return first_line(e)
    return way_to_error(e.error.at)


def _gave_up_first(e: RankReport, case: Case) -> tuple[Category, str, str] | None:
    """A rank whose timeout is shorter than the others' gave up on a rank that is only late."""
    mine = e.arguments.timeout_s
    longest = max(other.arguments.timeout_s or 0.0 for other in case.ranks)
    for other in case.ranks:
        never_ran = other.activity is Activity.IDLE and not other.entered
        if other.activity is Activity.DEAD or never_ran:
            return None  # that one will not come at all, however long it is waited for
    if mine is None or longest <= mine or not TIMED_OUT.search(e.error.text):
        return None
    return (
        Category.ENV_MISMATCH,
        f"waits {mine:g} s, other ranks up to {longest:g} s: it gave up first",
        "Give init_process_group the same timeout= on every rank, longer than the latest takes.",
    )


def first_line(e: RankReport) -> str:
    """The first line of a rank's error, or its type."""
    lines = e.error.text.strip().splitlines()
    return cut(lines[0], 300) if lines else e.error.type
