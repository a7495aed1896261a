"""Another host, played by this one: a real sshd, that ssh starts itself and that ends with it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from support import lacking

SSHD = "/usr/sbin/sshd"
_CLIENT = """\
Host {name}
  ProxyCommand {within} {sshd} -i -f {folder}/sshd-{name}
  IdentityFile {folder}/{key}
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known
  StrictHostKeyChecking no
  LogLevel ERROR
"""
_SERVER = """\
HostKey {folder}/host
PidFile none
AuthorizedKeysFile {folder}/user.pub
StrictModes no
UsePAM no
{more}
"""


def need_sshd() -> None:
    """Skip where there is no sshd; in CI that is a failure."""
    missing = [program for program in (SSHD, "ssh", "ssh-keygen") if shutil.which(program) is None]
    if missing:
        what = f"no {', '.join(missing)}: apt-get install openssh-server"
        lacking(what)
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # which sshd asks for, and a service would make


class Hosts:
    """Hosts that `ssh -F config` reaches. Keys and settings are in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.config = folder / "config"
        self.config.touch()
        for name in ("host", "user", "stranger"):
            key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(key, check=True)

    def add(self, name: str, *, within: str = "", key: str = "user", **variables: str) -> None:
        """One of that name, whose sessions have `variables`; `within` is what enters its place."""
        more = "SetEnv " + " ".join(f"{n}={v}" for n, v in variables.items()) if variables else ""
        folder = self._folder
        (folder / f"sshd-{name}").write_text(_SERVER.format(folder=folder, more=more))
        with self.config.open("a") as stream:
            stream.write(
                _CLIENT.format(name=name, within=within, sshd=SSHD, folder=folder, key=key)
            )
