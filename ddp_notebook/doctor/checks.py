"""The checks, functions of facts that return a `Check`: a test needs no broken machine.

Where `%ddp_init` would refuse or fail, the check says so in the same words (`as_init_says`).
"""

from __future__ import annotations

import errno
import ipaddress
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ddp_notebook.model import counted, format_bytes, name_ranks, verb
from ddp_notebook.model.doctor import Check, Verdict
from ddp_notebook.session.preflight import OLDEST, RANK_BYTES, release, why_too_little_memory

# -- software ----------------------------------------------------------------------------

Facts = Mapping[str, Any]
"""The result of `rank.inspect.facts.gather` in one process."""

_COMPARED = {
    "python": "Python",
    "torch": "torch",
    "ipyparallel": "ipyparallel",
    "ipykernel": "ipykernel",
    "nccl_version": "NCCL",
    "cuda_build": "torch's CUDA",
    "cuda_driver": "the CUDA driver",
}
"""Facts that must be the same on every rank, and their names for people."""

_ALIKE = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
"""Variables that must be equal, or the ranks do not meet."""
_OWN = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK", "CUDA_VISIBLE_DEVICES"),
    "TORCHELASTIC_ERROR_FILE",
)
"""Variables that may differ between ranks, as torchrun, or we in its place, give each its own."""


def check_version(distribution: str, version: str) -> Check:
    """The installed `version` of `distribution` is supported; empty when it is not installed."""
    name = "Python" if distribution == "python" else distribution
    oldest = OLDEST[distribution]
    install = f'{sys.executable} -m pip install "{distribution}>={oldest}"'
    if distribution == "python":
        install = f"Make a virtual environment with Python {oldest} or newer."
    if not version:
        return Check.failure(name, "not installed", install)
    if release(version) < release(oldest):
        text = f"{version} is older than {oldest}, the oldest supported"
        return Check.failure(name, text, install)
    return Check.ok(name, version)


def check_torch(facts: Facts) -> Check:
    """torch can be imported, is new enough and has torch.distributed."""
    if facts.get("torch_error"):
        return Check.failure(
            "torch",
            f"cannot be imported: {facts['torch_error']}",
            f"See the whole error: {sys.executable} -c 'import torch'. "
            f"Install it: {sys.executable} -m pip install torch",
        )
    version = check_version("torch", str(facts.get("torch", "")))
    if version.remedy:
        return version
    if not facts.get("distributed"):
        return Check.failure(
            "torch",
            f"{facts['torch']} was built without torch.distributed (USE_DISTRIBUTED=0)",
            f"Install a build from pytorch.org: {sys.executable} -m pip install torch",
        )
    build = f"for CUDA {facts['cuda_build']}" if facts.get("cuda_build") else "without CUDA"
    driver = f", driver {facts['cuda_driver']}" if facts.get("cuda_driver") else ""
    return Check.ok("torch", f"{facts['torch']}, built {build}{driver}")


def check_backend(facts: Facts, backend: str, on_gpus: bool) -> Check:
    """torch has the backend that is asked for; with auto, those that `%ddp_init` would choose.

    `on_gpus` says whether ranks would get a GPU each.
    """
    name = f"backend {backend}"
    available = [name for name in ("gloo", "nccl") if facts.get(name)]
    shown = f"torch has {' and '.join(available) or 'neither gloo nor nccl'}"
    if facts.get("nccl_version"):
        shown += f" {facts['nccl_version']}"
    install = f"Install a build from pytorch.org: {sys.executable} -m pip install torch"
    if backend != "auto" and backend not in available:
        use = available[0] if available else ""
        remedy = f"Use what it has: --backend {use}. Or: {install}" if use else install
        return Check.failure(name, f"{shown}, not {backend}", remedy)
    if not available or (backend == "auto" and "gloo" not in available and not on_gpus):
        return Check.failure(name, f"{shown}; ranks on CPUs need gloo", install)
    if backend == "auto" and len(available) == 1 and on_gpus:
        return Check.warning(
            name,
            f"{shown}; on GPUs %ddp_init needs both (cpu:gloo,cuda:nccl)",
            f"Use the one it has: --backend {available[0]}. Or: {install}",
        )
    return Check.ok(name, shown)


# -- between ranks -----------------------------------------------------------------------


def check_ranks(rank_facts: Mapping[int, Facts]) -> tuple[Check, ...]:
    """The ranks run the same software with the same settings, and each has its own RANK."""
    if not rank_facts:
        return ()
    versions = {
        label: {rank: str(facts.get(key) or "") for rank, facts in rank_facts.items()}
        for key, label in _COMPARED.items()
    }
    environments = {rank: facts.get("environment", {}) for rank, facts in rank_facts.items()}
    names = sorted({name for of_rank in environments.values() for name in of_rank} - {*_OWN})
    variables = {
        name: {rank: of_rank.get(name, "") for rank, of_rank in environments.items()}
        for name in names
    }
    again = "Install the same everywhere, then start new processes: %ddp_init --replace"
    set_same = "Set the same on all ranks (%%ddp, os.environ), or start new ones: %ddp_restart"
    return (
        _check_same("versions on ranks", rank_facts, versions, versions, again),
        _check_numbers(environments),
        _check_same("variables on ranks", rank_facts, variables, _ALIKE, set_same),
    )


def _check_numbers(environments: Mapping[int, Mapping[str, str]]) -> Check:
    numbers = {rank: of_rank.get("RANK", "unset") for rank, of_rank in environments.items()}
    wrong = {rank: number for rank, number in numbers.items() if number != str(rank)}
    if wrong:
        text = ", ".join(f"RANK is {number} on rank {rank}" for rank, number in wrong.items())
        text += ": a process group built from the environment would wait forever"
        remedy = "Code on the rank changed it. Start new processes: %ddp_restart --ranks "
        return Check.failure("RANK on ranks", text, remedy + ",".join(map(str, wrong)))
    return Check.ok("RANK on ranks", "each rank has its own number")


def _check_same(
    name: str,
    ranks: Collection[int],
    values: Mapping[str, Mapping[int, str]],
    needed: Collection[str],
    remedy: str,
) -> Check:
    """Each of `values` is the same on all ranks; a failure where it is among the `needed`.

    What differs is named with the ranks that have which value, the fewest ranks first, as
    ``torch: rank 2 has 2.5.1, ranks 0-1,3 have 2.6.0``.
    """
    differing = {}
    for what, of_ranks in values.items():
        groups = [(v, [r for r in of_ranks if of_ranks[r] == v]) for v in set(of_ranks.values())]
        groups.sort(key=lambda group: (len(group[1]), group[1]))
        shown = (f"{verb(own, 'has', 'have')} {value or 'none'}" for value, own in groups)
        if len(groups) > 1:
            differing[what] = f"{what}: {', '.join(shown)}"
    if not differing:
        return Check.ok(name, f"{name_ranks(ranks)}: all the same")
    # Of variables that place a rank a difference keeps ranks from meeting; any other is worth
    # knowing.
    verdict = Verdict.FAILURE if differing.keys() & {*needed} else Verdict.WARNING
    return Check(name, verdict, "; ".join(differing.values()), remedy)


# -- variables ---------------------------------------------------------------------------

_RENDEZVOUS = (
    *("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE"),
)
_NUMBERS = ("MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def check_rendezvous(environment: Mapping[str, str]) -> Check:
    """The rendezvous variables are not set in the environment that ranks are started from.

    `%ddp_init` sets them for its ranks, but a script that is started here reads these. It is a
    failure when no process group can be built with them.
    """
    name = "rendezvous variables"
    left = [v for v in _RENDEZVOUS if v in environment]
    if not left:
        return Check.ok(name, "none is set")
    remedy = f"Before Jupyter starts: unset {' '.join(left)}. In the notebook: import os; "
    remedy += f'os.environ.pop("{left[0]}")' + ", and likewise the others" * (len(left) > 1)
    wrong = list(_mistakes(environment))
    if wrong:
        found = f"{'; '.join(wrong)}. No script started here can build a process group"
        return Check.failure(name, found, remedy)
    shown = " ".join(f"{name}={environment[name]}" for name in left)
    in_job = "TORCHELASTIC_RUN_ID" in environment
    whose = "set by torchrun, which started this process" if in_job else "left over"
    return Check.warning(
        name,
        f"{whose}: {shown}. %ddp_init sets others for its ranks; a script started here reads these",
        remedy,
    )


def port_of(environment: Mapping[str, str]) -> int:
    """MASTER_PORT as a number; 0 when it is not set or not a port."""
    text = environment.get("MASTER_PORT", "").strip()
    return int(text) if re.fullmatch(r"\d{1,5}", text) and int(text) <= 65535 else 0


def _mistakes(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a clause for each value that cannot work."""
    if not environment.get("MASTER_ADDR", "here").strip():
        yield "MASTER_ADDR is empty"
    numbers: dict[str, int] = {}
    for name in _NUMBERS:
        text = environment.get(name)
        if text is None:
            continue
        if not re.fullmatch(r"\s*\d+\s*", text):
            yield f"{name}={text} is not a number of 0 or more"
        else:
            numbers[name] = int(text)
    if not 1 <= numbers.get("MASTER_PORT", 1) <= 65535:
        yield f"MASTER_PORT={numbers['MASTER_PORT']} is not a port (1 to 65535)"
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        if numbers.get(name) == 0:
            yield f"{name} must be at least 1, not 0"
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if 0 < numbers.get(size, 0) <= numbers.get(rank, 0):
            last = numbers[size] - 1
            yield f"{rank}={numbers[rank]} with {size}={numbers[size]}: ranks are 0 to {last}"


_ANY, _IS_ON = r".*", r"(?!(0|false|disabled|none)$).+"
_OLD_NAME = "the old name of TORCH_{0}: torch warns of it and will stop reading it"
_PINS = "every rank binds its threads to the same cores, and the other cores stay idle"
_TROUBLES = {
    "TORCH_DISTRIBUTED_DEBUG": (
        "detail",
        "DDP on gloo crashes with it (segmentation fault), and small collectives take several "
        "times as long",
        "Set it to INFO or unset it.",
    ),
    "TORCHELASTIC_USE_AGENT_STORE": (
        "(?-i:True)",  # torch compares with exactly this text
        "left over from a torchrun job: rank 0 of a script started here opens no store, and "
        "all ranks wait for one",
        "Unset it. %ddp_init sets it for its ranks, because the session hosts their store.",
    ),
    "CUDA_LAUNCH_BLOCKING": (
        _IS_ON,
        "every CUDA kernel runs synchronously: communication cannot overlap with computation, "
        "and timings mean nothing",
        "Unset it unless you are looking for the line of a CUDA error.",
    ),
    **dict.fromkeys(
        ("NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT", "NCCL_DESYNC_DEBUG"),
        (_ANY, _OLD_NAME, "Set TORCH_{0} instead and unset {0}."),
    ),
    **dict.fromkeys(
        ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
        (
            _ANY,
            "chooses AMD GPUs, but %ddp_init gives ranks those of CUDA_VISIBLE_DEVICES",
            "Set CUDA_VISIBLE_DEVICES to the same: ROCm reads it as well.",
        ),
    ),
    **dict.fromkeys(
        ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"), (_IS_ON, _PINS, "Unset {0}.")
    ),
}
"""Variables with values (in any case) that make trouble, their effect, and the remedy."""


def check_known_trouble(environment: Mapping[str, str]) -> tuple[Check, ...]:
    """Warn of each variable that is known to make trouble; a single ok without one."""
    warnings = [
        Check.warning(name, f"{environment[name]}: {effect.format(name)}", remedy.format(name))
        for name, (values, effect, remedy) in _TROUBLES.items()
        if name in environment and re.fullmatch(values, environment[name].strip(), re.IGNORECASE)
    ]
    return tuple(warnings) or (Check.ok("other variables", "none known to cause trouble"),)


# -- network -----------------------------------------------------------------------------


class Holder(NamedTuple):
    """A process that holds a port; the system hides the `pid` of another user's (None)."""

    pid: int | None
    command: str

    def __str__(self) -> str:
        if self.pid is None:
            return "a process of another user"
        return f"pid {self.pid} ({self.command or 'its command is not known'})"


@dataclass(frozen=True, slots=True)
class Lookup:
    """The addresses of a host name; `error` says why it does not resolve, else empty."""

    name: str
    addresses: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface: whether it is up, and its addresses."""

    up: bool
    addresses: tuple[str, ...]


# -- ports -------------------------------------------------------------------------------


def check_port(port: int, asked_by: str, refused: int, holders: Sequence[Holder]) -> Check:
    """The port of the store can be listened on.

    `asked_by` names the option or the variable it comes from; `refused` is the errno of the
    attempt, 0 if it succeeded. `holders` are the processes known to hold the port.
    """
    name = f"port {port}"
    elsewhere = (
        "Leave --master-port out (%ddp_init chooses a free port), or give another one."
        if asked_by == "--master-port"
        else f"Give another {asked_by}, or unset it: %ddp_init chooses a free port."
    )
    if refused == errno.EADDRINUSE:
        who = ", ".join(str(holder) for holder in holders) or "a process that cannot be identified"
        pids = sorted({holder.pid for holder in holders if holder.pid})
        end = f" If it is a job of yours that should be over: kill {pids[0]}" if pids else ""
        return Check.failure(name, f"{asked_by} is in use by {who}", elsewhere + end)
    if refused == errno.EACCES:
        return Check.failure(
            name, f"{asked_by} is below 1024, where only the administrator may listen", elsewhere
        )
    if refused:
        why = errno.errorcode.get(refused, str(refused))
        return Check.failure(name, f"{asked_by} cannot be listened on ({why})", elsewhere)
    return Check.ok(name, "free")


# -- names -------------------------------------------------------------------------------


def is_loopback(address: str) -> bool:
    """Return whether an address only reaches this host itself."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def check_host_name(lookup: Lookup, own: Collection[str], several_hosts: bool) -> Check:
    """This host's name resolves to it. `own` are the addresses of its interfaces, if known.

    A loopback address is as good as any on one host. With `several_hosts` it is wrong: the other
    hosts would connect to themselves.
    """
    name = "host name"
    shown = f"{lookup.name} resolves to {', '.join(lookup.addresses)}"
    remedy = "Name the interface to use: GLOO_SOCKET_IFNAME=eth0 (ip addr lists them)"
    if lookup.error:
        return Check.warning(
            name,
            f"{lookup.name} does not resolve ({lookup.error}): gloo falls back to loopback, so "
            "only ranks of this host can connect",
            f"Add it to /etc/hosts, or: {remedy}",
        )
    if all(is_loopback(address) for address in lookup.addresses):
        if several_hosts:
            return Check.warning(name, f"{shown}: other hosts would connect to themselves", remedy)
        return Check.ok(name, f"{shown}, which is enough on one host")
    if own and not set(lookup.addresses) & set(own):
        return Check.warning(name, f"{shown}, which is no address of this host", remedy)
    return Check.ok(name, shown)


def check_master_addr(lookup: Lookup | None, own: Collection[str]) -> Check:
    """MASTER_ADDR, where it is set (None: it is not), is an address of this host.

    `own` are the addresses of its interfaces, if known.
    """
    name = "MASTER_ADDR"
    if lookup is None:
        return Check.ok(name, "not set: %ddp_init uses 127.0.0.1")
    if lookup.error:
        return Check.failure(
            name,
            f"{lookup.name} does not resolve ({lookup.error})",
            "Give an address or a name that every host knows: MASTER_ADDR=127.0.0.1 for one host",
        )
    shown = lookup.name
    if lookup.addresses != (lookup.name,):
        shown += f" resolves to {', '.join(lookup.addresses)}"
    # Interfaces may be hidden, as in a container: then nothing is said against an address.
    leads_here = any(a in own or is_loopback(a) for a in lookup.addresses)
    if own and not leads_here:
        return Check.warning(
            name,
            f"{shown}, which is another host: rank 0 of a script must run there",
            "For one host: MASTER_ADDR=127.0.0.1, or unset it",
        )
    return Check.ok(name, f"{shown}, which is this host" if leads_here else shown)


# -- interfaces --------------------------------------------------------------------------


def check_interfaces(
    environment: Mapping[str, str], interfaces: Mapping[str, Interface], nccl_wanted: bool
) -> tuple[Check, ...]:
    """The interfaces that variables name exist, are up and have an address.

    gloo and TensorPipe need full names; NCCL takes prefixes. A wrong variable of NCCL is only a
    warning unless `nccl_wanted`.
    """
    usable = ", ".join(n for n in sorted(interfaces) if not _unusable(interfaces[n])) or "none"
    checks = []
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        value, of_nccl = environment.get(variable, ""), variable.startswith("NCCL")
        if not value:
            continue
        trouble = _interface_trouble(variable, value, interfaces)
        remedy = f"Unset {variable}, or name one of: {usable}"
        if not trouble:
            checks.append(Check.ok(variable, value))
        elif of_nccl and not nccl_wanted:
            found = f"{value}: {trouble} (only NCCL reads it)"
            checks.append(Check.warning(variable, found, remedy))
        else:
            checks.append(Check.failure(variable, f"{value}: {trouble}", remedy))
    return tuple(checks) or (Check.ok("interfaces", f"{usable} up; no variable chooses one"),)


def _interface_trouble(variable: str, value: str, interfaces: Mapping[str, Interface]) -> str:
    """Return why the interfaces that `value` names cannot be used; empty when they can."""
    if variable.startswith("NCCL"):
        # NCCL takes the first interfaces that match, so one that works is enough.
        chosen = nccl_interfaces(value, interfaces)
        if any(not _unusable(interfaces[name]) for name in chosen):
            return ""
        return (
            f"{chosen[0]} {_unusable(interfaces[chosen[0]])}" if chosen else "no interface matches"
        )
    # gloo splits at commas, TensorPipe takes the whole text as one name. Not stripped: torch does
    # not strip them either.
    for name in value.split(",") if variable.startswith("GLOO") else [value]:
        if name not in interfaces:
            form = "; only NCCL reads ^ and =" if name[:1] in ("^", "=") else ""
            return f"there is no interface {name!r}{form}"
        if why := _unusable(interfaces[name]):
            return f"{name} {why}"
    return ""


def _unusable(interface: Interface) -> str:
    """Return why it cannot be used; empty when it can."""
    if not interface.up:
        return "is down"
    return "" if interface.addresses else "has no address"


def nccl_interfaces(value: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return the interfaces that NCCL_SOCKET_IFNAME chooses among `names`.

    ``eth`` means every name that starts so, ``=eth0`` exactly that name, ``^docker`` all names
    but those, ``^=docker0`` all but that one. Commas separate several; the sign stands once.
    """
    rest, exclude = (value[1:], True) if value.startswith("^") else (value, False)
    rest, exact = (rest[1:], True) if rest.startswith("=") else (rest, False)
    wanted = [part.partition(":")[0] for part in rest.split(",") if part]  # without a port

    def matches(name: str) -> bool:
        return name in wanted if exact else name.startswith(tuple(wanted))

    return tuple(name for name in names if matches(name) is not exclude)


# -- machine -----------------------------------------------------------------------------

SHARED_MEMORY = "/dev/shm"  # noqa: S108  # looked at, not written to


def as_init_says(name: str, why: str, fine: str, verdict: Verdict = Verdict.FAILURE) -> Check:
    """Return the words in which `%ddp_init` refuses or fails, as a check; `fine` without any."""
    if why:
        found, _, remedy = why.partition(". ")
        return Check(name, verdict, found, remedy)
    return Check.ok(name, fine)


def check_memory(world_size: int, left_bytes: int) -> Check:
    """Memory for the ranks, of which `left_bytes` are left."""
    name = "memory"
    found = f"{format_bytes(left_bytes)} available"
    why = why_too_little_memory(world_size, left_bytes)
    if why or left_bytes >= world_size * RANK_BYTES:
        return as_init_says(name, why, found)
    needed = f"{counted(world_size, 'rank')} with a small model take about "
    fits = max(1, left_bytes // RANK_BYTES)
    remedy = "Free memory (%ddp_shutdown in other notebooks, idle kernels)"
    remedy += f", or start fewer ranks: -n {fits}" if fits < world_size else ", or add memory."
    found = f"{found}; {needed}{format_bytes(world_size * RANK_BYTES)}"
    return Check.warning(name, found, remedy)


def check_shared_memory(size: tuple[int, int] | None, nccl_wanted: bool) -> Check:
    """The shared memory of Linux, as (total, free) bytes; None where it is missing.

    DataLoader workers and NCCL pass data through it; gloo does not.
    """
    name = SHARED_MEMORY
    more = "In Docker: docker run --shm-size=2g, or --ipc=host. Otherwise: sudo mount -o "
    more += "remount,size=2g /dev/shm"
    if size is None:
        return Check.warning(
            name, "missing: DataLoader workers cannot start", "sudo mount -t tmpfs tmpfs /dev/shm"
        )
    total, free = size
    found = f"{format_bytes(free)} free of {format_bytes(total)}"
    if free < 32 << 20 and nccl_wanted:
        return Check.failure(
            name, f"{found}: NCCL needs more", f"{more}. What fills it: ls /dev/shm"
        )
    if free < 32 << 20 <= total:
        return Check.warning(
            name, f"{found}: DataLoader workers will crash", "See what fills it: ls /dev/shm"
        )
    # Docker gives a container 64 MiB by default.
    if total < 256 << 20:
        return Check.warning(name, f"{found}: too little for DataLoader workers", more)
    return Check.ok(name, found)


def check_cores(cores: int, world_size: int, omp_num_threads: str | None) -> Check:
    """Cores for the threads of all ranks.

    OMP_NUM_THREADS matters for scripts that are started here; %ddp_init sets it for its ranks.
    """
    name = "cores"
    if world_size > cores:
        return Check.warning(
            name,
            f"{world_size} ranks share {cores}: fine for learning, but timings are not meaningful",
            f"For timings: -n {cores}",
        )
    first = (omp_num_threads or "").partition(",")[0].strip()  # OpenMP allows a list
    # torch reads OMP_NUM_THREADS in a script; %ddp_init sets it to cores / ranks.
    threads = int(first) if first.isdecimal() else 1
    if world_size * threads > cores:
        found = f"{world_size} ranks × {threads} threads (OMP_NUM_THREADS) on {cores}: they slow "
        found += "each other down"
        return Check.warning(
            name, found, f"Use {cores // world_size} threads a rank, as %ddp_init does by default."
        )
    return Check.ok(name, f"{cores} for {counted(world_size, 'rank')}")
