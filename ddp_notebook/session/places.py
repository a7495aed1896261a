"""The properties of a rank's place: this machine, or another host."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ddp_notebook import files
from ddp_notebook.errors import SetupFailed, UsageMistake
from ddp_notebook.launch import host_facts
from ddp_notebook.launch.devices import DevicePlan
from ddp_notebook.launch.environment import loopback_interface
from ddp_notebook.launch.hosts_client import HostsClient, ProcessStarter
from ddp_notebook.model import Ranks
from ddp_notebook.session.far_hosts import FarHosts
from ddp_notebook.session.options import InitOptions

_MOST_TEXT_BYTES = 1 << 28
_SILENT_S = 3.0
"""A host that lives is seen each second."""


@dataclass(frozen=True, slots=True)
class Places:
    """The places of a session's ranks, as its options say; `far` are other hosts, None for none.

    `folder` is the session's.
    """

    options: InitOptions
    devices: DevicePlan
    starter: ProcessStarter
    far: FarHosts | None
    folder: Path

    @property
    def master_addr(self) -> str:
        """Where the ranks meet, and the store listens."""
        return self.far.master_addr if self.far is not None else self.options.master_addr

    def cores(self, rank: int) -> int:
        """Return the CPU cores of a rank's host."""
        if self.far is None:
            return host_facts.cores()
        return self.far.hellos[self.options.placement.host(rank)].cores

    def threads(self, rank: int) -> int:
        """Return the intra-op threads of a rank."""
        if self.far is None or self.options.threads_per_rank:
            return self.options.threads
        return max(1, self.cores(rank) // self.options.placement.local(rank)[1])

    def free_port(self, rank: int) -> int:
        """Return a port that is free at the master's address, on the host of `rank`."""
        host = self.options.placement.host(rank)
        return int(self.starter.question(host, "free_port", address=self.master_addr) or 0)

    def folder_on(self, host: int) -> str:
        """Return the current folder of ranks on a host."""
        return self.far.hellos[host].current_folder if self.far is not None else str(Path.cwd())

    def files_of(self, file: Path, ranks: Ranks) -> dict[int, str]:
        """Return where each rank finds a file of this machine. Raises UsageMistake."""
        host = self.options.placement.host
        there = {number: str(self.file_on(number, file)) for number in {*map(host, ranks)}}
        return {rank: there[host(rank)] for rank in ranks}

    def file_on(self, host: int, file: Path) -> Path:
        """Return where a file of this machine is on a host.

        Raises UsageMistake where it is not there, or another one is.
        """
        if self.far is None:
            return file
        name, copy, here = self.options.placement.name(host), file, Path.cwd()
        if file.is_relative_to(here):
            copy = Path(self.folder_on(host), file.relative_to(here))
        digest = self.starter.question(host, "digest", path=str(copy))
        if digest is None:
            raise UsageMistake(f"Host {name} does not answer. See: %ddp_status")
        if digest != host_facts.digest(str(file)):
            what = "another file is" if digest else "no such file is"
            raise UsageMistake(
                f"{file.name} cannot run on host {name}: {what} at {copy} there. "
                f"Copy it: scp {file} {name}:{copy}"
            )
        return copy

    def variables(self, rank: int) -> dict[str, str]:
        """Return what gloo and NCCL are to use: variables that the user has not set.

        Where the ranks meet on the loopback interface, that one: both listen on the first other one
        by default, where other hosts can connect. On several hosts, the one that faces the first.
        What torch's flight recorder writes of a hang, after minutes, goes into the session's
        folder, and with it.
        """
        local = self.master_addr in ("127.0.0.1", "localhost", "::1")
        interface = loopback_interface() if local else ""
        if self.far is not None:
            interface = self.far.interfaces[self.options.placement.host(rank)]
        wanted = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interface)
        if "nccl" in self.devices.backend:
            wanted["TORCH_FR_DUMP_TEMP_FILE"] = str(self.folder / "log" / "nccl_trace_rank_")
        return {name: value for name, value in wanted.items() if value and name not in os.environ}

    def environment(self, ranks: Ranks, of: int) -> dict[str, str]:
        """Environment variables of a script's process `of` besides the notebook's and torchrun's.

        It sees the GPUs of all `ranks` on its host: each takes its own by LOCAL_RANK.
        """
        devices, host = self.devices, self.options.placement.host
        there = [rank for rank in ranks if host(rank) == host(of)]
        gpus = ",".join(dict.fromkeys(devices.gpus[rank] for rank in there)) if devices.gpus else ""
        # By the numbers that the ranks' own processes use.
        order = os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        visible = {"CUDA_VISIBLE_DEVICES": gpus, "CUDA_DEVICE_ORDER": order} if gpus else {}
        return {"OMP_NUM_THREADS": str(self.threads(of)), **visible, **self.variables(of)}

    def text_of(self, rank: int, file: Path) -> str:
        """Return a file of the session's that a rank has written; empty where there is none.

        On another host it is read there: what is long is not brought here unasked.
        """
        host = self.options.placement.host(rank)
        if self.far is None:
            return files.tail(file)
        there = str(Path(self.far.hellos[host].folder, file.relative_to(self.folder)))
        data = bytearray()
        while len(data) < _MOST_TEXT_BYTES:
            part = self.starter.question(
                host, "file_part", path=there, begin=len(data), size=1 << 18
            )
            if not part:
                break
            data += part.encode("latin-1", "replace")
        return data.decode("utf-8", "replace")

    def need_heard(self, ranks: Ranks) -> None:
        """Raise SetupFailed where a host of `ranks` is silent."""
        starter, placement = self.starter, self.options.placement
        if not isinstance(starter, HostsClient):
            return
        for host in {*map(placement.host, ranks)}:
            name, silent_s = placement.name(host), starter.silent_s(host)
            if silent_s > _SILENT_S:
                raise SetupFailed(
                    f"Host {name} was last seen {silent_s:.0f} s ago: its link is cut, or it "
                    f"is down. No rank was ended. Look: ssh {name} true. Its ranks go on if it is "
                    f"seen again within {self.options.give_up_after_s:g} s. To go on without it: "
                    "%ddp_init --replace --hosts, with the others"
                )
