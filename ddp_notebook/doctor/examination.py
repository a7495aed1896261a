"""`examine`: finds the facts and makes all checks, in order. Changes nothing, starts no rank."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

import psutil

from ddp_notebook.doctor import checks, gpu_checks
from ddp_notebook.doctor.checks import Holder, Interface, Lookup
from ddp_notebook.launch import devices, gpu_links
from ddp_notebook.launch.addresses import why_no_loopback
from ddp_notebook.launch.host_facts import cores
from ddp_notebook.launch.out_of_memory import bytes_left
from ddp_notebook.launch.session_folder import parents
from ddp_notebook.model import format_bytes
from ddp_notebook.model.doctor import Check, DoctorReport, Verdict
from ddp_notebook.session import preflight
from ddp_notebook.session.options import InitOptions, check_world_size

Look: TypeAlias = Callable[[], Check | Iterable[Check]]
"""Makes one check or several, and gets the facts for it only when called."""

_ASK_TORCH = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop());"
    "from ddp_notebook.rank.inspect.facts import gather;"
    "print('\\n' + json.dumps(gather(probe_cuda=True)))"
)


def examine(
    world_size: int,
    *,
    backend: str = "auto",
    master_port: int = 0,
    rank_facts: Mapping[int, Mapping[str, Any]] | None = None,
    command: str = "%ddp_doctor",
) -> DoctorReport:
    """Check whether `world_size` ranks can work here; starts none, changes nothing.

    The arguments are those of `%ddp_init`; `command` is what the user typed, for messages.
    `rank_facts` is what `rank.inspect.facts.gather` returned on running ranks; without it a fresh
    Python is asked about torch, which takes seconds. Raises UsageMistake.
    """
    check_world_size(world_size, command)
    # Checks the other arguments.
    InitOptions(world_size=world_size, backend=backend, master_port=master_port)
    torch = rank_facts[min(rank_facts)] if rank_facts else torch_facts()
    environment = dict(os.environ)
    gpus = devices.gpus()
    # Without the variable CUDA shows all GPUs; with it those that it names, in its order.
    chosen = "CUDA_VISIBLE_DEVICES" in environment
    pool = list(devices.visible_gpus()) if chosen else [gpu.index for gpu in gpus]
    for_gpus = not torch.get("torch") or bool(torch.get("cuda_build"))
    nccl = backend == "nccl" or (backend == "auto" and for_gpus and world_size <= len(pool))
    asked_by = "--master-port" if master_port else "MASTER_PORT"
    port = master_port or checks.port_of(environment)
    master = environment.get("MASTER_ADDR", "").strip()
    master_lookup = look_up(master) if master else None
    several = master_lookup is not None and not all(
        map(checks.is_loopback, master_lookup.addresses)
    )
    nics = interfaces()
    own = {address for nic in nics.values() for address in nic.addresses}
    # A kernel has about 70 files open before there are ranks.
    opened = 0 if rank_facts else max(70, preflight.open_files())
    looks: dict[str, Look] = {
        "rendezvous variables": lambda: checks.check_rendezvous(environment),
        "other variables": lambda: checks.check_known_trouble(environment),
        "Python": lambda: checks.check_version("python", platform.python_version()),
        "torch": lambda: checks.check_torch(torch),
        "backend": lambda: checks.check_backend(torch, backend, nccl),
        "ipyparallel": lambda: _check_installed("ipyparallel"),
        "ipykernel": lambda: _check_installed("ipykernel"),
        "ranks": lambda: checks.check_ranks(rank_facts or {}),
        "file names": lambda: checks.as_init_says(
            "file names",
            preflight.why_not_loaded(["", *sys.path]),
            "no file here hides a module",
            Verdict.WARNING,  # many such files are harmless
        ),
        **_looks_at_gpus(world_size, backend, pool, gpus, torch, rank_facts or {}),
        "InfiniBand": lambda: gpu_checks.check_infiniband(
            infiniband_ports() if nccl else {}, environment
        ),
        f"port {port}": lambda: (
            checks.check_port(port, asked_by, try_port(port), holders_of(port)) if port else ()
        ),
        "loopback": lambda: checks.as_init_says(
            "loopback", why_no_loopback(), "two processes can connect over 127.0.0.1"
        ),
        "MASTER_ADDR": lambda: checks.check_master_addr(master_lookup, own),
        "host name": lambda: checks.check_host_name(look_up(socket.gethostname()), own, several),
        "interfaces": lambda: checks.check_interfaces(environment, nics, nccl) if nics else (),
        "memory": lambda: checks.check_memory(world_size, bytes_left()),
        checks.SHARED_MEMORY: lambda: checks.check_shared_memory(shared_memory(), nccl),
        "open files": lambda: checks.as_init_says(
            "open files", preflight.why_too_low_for_files(world_size, opened), "enough (ulimit -n)"
        ),
        "processes": lambda: checks.as_init_says(
            "processes", preflight.why_too_few_processes(world_size), "enough (ulimit -u)"
        ),
        "cores": lambda: checks.check_cores(
            cores(), world_size, environment.get("OMP_NUM_THREADS")
        ),
        "temporary folder": check_temporary_folder,
    }
    if not (torch.get("torch") and torch.get("distributed")):
        del looks["backend"]  # what is wrong with torch is said once
    if not sys.platform.startswith("linux"):
        del looks[checks.SHARED_MEMORY]
    made: list[Check] = []
    for name, look in looks.items():
        try:
            check = look()
            made += [check] if isinstance(check, Check) else check
        except (psutil.Error, OSError, ValueError) as error:
            remedy = "%ddp_init works without this check. Check it by hand."
            made.append(Check.warning(name, f"could not be checked: {error}", remedy))
    return DoctorReport(tuple(made), world_size, backend)


def _looks_at_gpus(
    world_size: int,
    backend: str,
    pool: Sequence[str],
    gpus: Sequence[devices.Gpu],
    torch: Mapping[str, Any],
    rank_facts: Mapping[int, Mapping[str, Any]],
) -> dict[str, Look]:
    """Return the checks of the GPUs of this machine; `pool` is those that ranks would get."""
    chosen, build = os.environ.get("CUDA_VISIBLE_DEVICES"), str(torch.get("cuda_build") or "")
    links = gpu_links.read(pool) if gpus else gpu_links.Links()
    own = socket.gethostname()  # on another host, a pid is another process's
    ranks = {
        int(facts.get("pid", 0)): rank
        for rank, facts in rank_facts.items()
        if facts.get("host", own) == own
    }
    return {
        "CUDA_VISIBLE_DEVICES": lambda: gpu_checks.check_visible_devices(
            chosen, gpus, torch.get("devices")
        ),
        "devices": lambda: gpu_checks.check_devices(world_size, backend, pool, torch),
        "GPUs": lambda: gpu_checks.check_gpus(gpus if pool else (), links, ranks),
        "GPU driver": lambda: gpu_checks.check_driver(links, build),
        "GPU faults": lambda: gpu_checks.check_gpu_faults(links),
        "GPU links": lambda: gpu_checks.check_gpu_links(links),
    }


# -- software ----------------------------------------------------------------------------


def torch_facts(timeout_s: float = 90.0) -> dict[str, Any]:
    """Return what `rank.inspect.facts.gather` says in a fresh Python: this one imports no torch.

    When that Python fails or takes too long, `torch_error` says so. A cold disk takes a minute.
    """
    command = [sys.executable, "-c", _ASK_TORCH, json.dumps(sys.path)]
    try:
        asked = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return {"torch_error": f"importing it takes longer than {timeout_s:.0f} s"}
    except OSError as error:
        return {"torch_error": f"{sys.executable} cannot be started: {error}"}
    # What importing torch prints comes before; the answer is the last line.
    lines = asked.stdout.splitlines()
    if asked.returncode == 0 and lines:
        with contextlib.suppress(ValueError):
            facts: dict[str, Any] = json.loads(lines[-1])
            return facts
    last = (asked.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    return {"torch_error": f"a Python that imports it ends with {asked.returncode}: {last}"}


def _check_installed(distribution: str) -> Check:
    version = ""
    with contextlib.suppress(metadata.PackageNotFoundError):
        version = metadata.version(distribution)
    return checks.check_version(distribution, version)


# -- network -----------------------------------------------------------------------------


def try_port(port: int) -> int:
    """Return 0 when `port` can be bound on every address of this host, else the errno.

    It is bound as torch's store binds it, and closed without listening.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # torch sets SO_REUSEADDR as well: without it a port in TIME_WAIT would seem to be taken.
        if sys.platform != "win32":  # there it would take another process's port
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno or errno.EIO
    return 0


def holders_of(port: int) -> tuple[Holder, ...]:
    """Return the processes that have TCP port `port`, those that listen at it if there are any."""
    sockets: list[Any] = []
    with contextlib.suppress(psutil.Error, OSError):  # where that is forbidden
        sockets = [s for s in psutil.net_connections("tcp") if s.laddr and s.laddr.port == port]
    # Those that are connected to the port, as ranks are, do not hold it.
    listening = [s for s in sockets if s.status == psutil.CONN_LISTEN]
    holders = []
    for pid in dict.fromkeys(s.pid for s in listening or sockets):
        command = ""
        with contextlib.suppress(psutil.Error, OSError):
            command = " ".join(psutil.Process(pid).cmdline())[:120] if pid else ""
        holders.append(Holder(pid, command))
    return tuple(holders)


def look_up(name: str, timeout_s: float = 5.0) -> Lookup:
    """Return the addresses of a host name, or why it does not resolve in time."""
    answers: list[Lookup] = []

    def ask() -> None:
        try:
            answer = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # UnicodeError: not a possible host name
            why = getattr(error, "strerror", None) or str(error)
            answers.append(Lookup(name, error=why))
            return
        addresses = tuple(dict.fromkeys(str(entry[4][0]) for entry in answer))
        answers.append(Lookup(name, addresses))

    # getaddrinfo has no timeout of its own, and a thread that is in it cannot be ended: it is left
    # behind where the resolver takes longer.
    thread = threading.Thread(target=ask, name="ddp-look-up", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return answers[0] if answers else Lookup(name, error=f"no answer within {timeout_s:g} s")


def interfaces() -> Mapping[str, Interface]:
    """Return the network interfaces by name; none where that is forbidden."""
    try:
        addresses, states = psutil.net_if_addrs(), psutil.net_if_stats()
    except (psutil.Error, OSError):
        return {}
    return {
        name: Interface(
            up=name in states and bool(states[name].isup),
            addresses=tuple(
                address.address.partition("%")[0]
                for address in addresses.get(name, ())
                if address.family in (socket.AF_INET, socket.AF_INET6)
            ),
        )
        for name in sorted({*addresses, *states})
    }


def infiniband_ports(root: Path = Path("/sys/class/infiniband")) -> dict[str, tuple[str, str]]:
    """Return the state and rate of each port of InfiniBand, as Linux shows them; none without."""
    ports = {}
    for port in sorted(root.glob("*/ports/*")):
        with contextlib.suppress(OSError):
            state, rate = ((port / name).read_text().strip() for name in ("state", "rate"))
            ports[f"{port.parents[1].name}:{port.name}"] = (state, rate)
    return ports


# -- machine -----------------------------------------------------------------------------


def shared_memory() -> tuple[int, int] | None:
    """Return total and free bytes of /dev/shm, None where it is missing."""
    try:
        usage = shutil.disk_usage(checks.SHARED_MEMORY)
    except OSError:
        return None
    return usage.total, usage.free


def check_temporary_folder() -> Check:
    """The folder in which that of a session is made can be written to and has room."""
    name = "temporary folder"
    try:
        folder = parents()[0]
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
    except OSError as error:  # or Python tried several and can write to none
        remedy = "Before Jupyter starts: export TMPDIR=/tmp (or another folder)"
        return Check.failure(name, str(error), remedy)
    free = format_bytes(shutil.disk_usage(folder).free)
    return checks.as_init_says(name, preflight.why_no_room(), f"{folder}, {free} free")
