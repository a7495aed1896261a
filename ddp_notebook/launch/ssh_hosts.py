"""Starts a host's agent by the user's ssh, and says in words why that failed.

One ssh a host: it runs the agent, whose standard input it is, and brings the ports of the session's
controller to that host's loopback interface, so nothing of ours listens beyond that anywhere. It
asks no one for a password. What the agent must know comes by standard input: the arguments of a
command can be read by every user of the host.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import shlex
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from ddp_notebook.errors import SetupFailed, UsageMistake
from ddp_notebook.launch.timeouts import scaled_for_load

SSH_VARIABLE = "DDP_NOTEBOOK_SSH"
"""The command to run in place of ssh, with its options: `ssh -J login`."""
CONNECTS_WITHIN_S = 10
_OPTIONS = (
    *("-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECTS_WITHIN_S}"),
    # A link may be cut for a while: who waits for how long is the agent's business (its lease).
    *("-o", "ServerAliveInterval=0", "-o", "TCPKeepAlive=no"),
    # A connection that others share would keep our ports when we have ended.
    *("-o", "ControlPath=none", "-o", "ExitOnForwardFailure=yes"),
    *("-T", "-a", "-x"),
)
_MARK = "ddp-notebook-agent "
"""How a line of the agent begins: shells print their own when they start."""
_BOOT = f"""
import json, sys
def say(**what): print({_MARK!r} + json.dumps(what), flush=True)
say(python=sys.version.split()[0], path=sys.executable)
try:
    from ddp_notebook.launch.agent import main
except Exception as error:
    say(lacking=str(getattr(error, "name", None) or error))
else:
    main(say)
"""
"""Older Pythons and such without any package can run this, so that it is they who are named."""
_PYTHON_THERE = 'if [ -x "$0" ]; then exec "$0" "$@"; fi; exec python3 "$@"'
"""The script of the shell there: the notebook's own Python, as hosts may share a file system."""
_FIRST_PORT, _LAST_PORT = 20_000, 32_000
"""The ports that are tried there: the system gives others to connections."""
_random = random.SystemRandom()


def ssh_command() -> tuple[str, ...]:
    """Return the words that run ssh here. Raises UsageMistake."""
    given = os.environ.get(SSH_VARIABLE, "")
    try:
        return tuple(shlex.split(given)) or ("ssh",)
    except ValueError as error:
        raise UsageMistake(f"{SSH_VARIABLE}={given!r} is not a command: {error}.") from None


def tunneled(connection: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a controller's connection file as it is for another host, and ssh's options for it.

    Its ports are brought to free ones of the host's loopback interface.
    """
    _, _, address = str(connection["interface"]).partition("://")
    ports = [port for value in connection.values() for port in _ports_in(value)]
    there = dict(
        zip(ports, _random.sample(range(_FIRST_PORT, _LAST_PORT), len(ports)), strict=True)
    )

    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return [moved(each) for each in value]
        return there.get(value, value) if isinstance(value, int) else value

    forwards = [word for p in ports for word in ("-R", f"127.0.0.1:{there[p]}:{address}:{p}")]
    own = {name: moved(value) for name, value in connection.items()}
    return {**own, "interface": "tcp://127.0.0.1", "location": ""}, forwards


def _ports_in(value: Any) -> list[int]:
    if isinstance(value, list):
        return [port for each in value for port in _ports_in(each)]
    return [value] if isinstance(value, int) and not isinstance(value, bool) else []


class Ssh:
    """One ssh, with the agent at its other end.

    `told` gets what the agent's lines say, and `ended` is called once when ssh has ended; both on a
    thread of its own. Raises UsageMistake where there is no such program.
    """

    def __init__(
        self,
        name: str,
        python: str,
        forwards: list[str],
        settings: Mapping[str, Any],
        told: Callable[[dict[str, Any]], None],
        ended: Callable[[], None],
    ) -> None:
        self._name = name
        self._python = python or sys.executable
        self._ssh = ssh_command()
        self._told, self._ended = told, ended
        self._last: deque[str] = deque(maxlen=20)
        """The last lines that are not the agent's."""
        boot = base64.b64encode(_BOOT.encode()).decode()
        # Encoded: each shell has rules of its own for quotes and line breaks.
        words = ["-c", f"import base64;exec(base64.b64decode('{boot}'))"]
        run = ("exec", python) if python else ("exec", "sh", "-c", _PYTHON_THERE, self._python)
        command = [*self._ssh, *_OPTIONS, *forwards, "--", name, shlex.join((*run, *words))]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in a terminal is not for it
            )
        except OSError as error:
            raise UsageMistake(f"ssh cannot be started: {error}") from None
        threading.Thread(target=self._read, name="ddp-ssh", daemon=True).start()
        with contextlib.suppress(OSError):  # it has ended: why, it says on its way
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(settings).encode() + b"\n")
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        """Its process here."""
        return self._process.pid

    @property
    def last(self) -> str:
        """The last line that is not the agent's, or empty."""
        return self._last[-1].rstrip(".") if self._last else ""

    @property
    def port_was_taken(self) -> bool:
        """True when it ended because a port there was another's, or may not be forwarded."""
        return any("forwarding failed" in line for line in self._last)

    def _read(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        while line := stream.readline(1 << 16).decode(errors="replace"):
            if line.startswith(_MARK):
                with contextlib.suppress(ValueError, TypeError, LookupError):
                    self._told(json.loads(line.removeprefix(_MARK)))
            elif line.strip():
                self._last.append("".join(c for c in line.strip() if c.isprintable())[:300])
        self._process.wait()
        stream.close()
        self._ended()

    def hang_up(self) -> None:
        """Have the agent end."""
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()

    def wait(self, timeout_s: float) -> None:
        """Return when it has ended; it is killed where the other end does not answer."""
        try:
            self._process.wait(scaled_for_load(timeout_s))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    # -- why there is no agent -----------------------------------------------------------------

    def why_ended(self) -> str:
        """Return why ssh has ended before there was an agent, and what to type."""
        name, code = self._name, self._process.returncode
        last = self.last or "nothing"
        if self.port_was_taken:
            return (
                f"Host {name}: ssh may not bring the controller's ports there: {last}. Its sshd "
                "must allow it: AllowTcpForwarding yes in sshd_config."
            )
        if code == 255:
            by_hand = shlex.join((*self._ssh, name, "true"))
            return (
                f"Host {name} cannot be reached, and no password is asked for here. "
                f"{self._ssh[0]} says: {last}. Try it in a shell: {by_hand}"
            )
        if code in (126, 127):
            return (
                f"There is no Python {self._python} on host {name}: {last}. Say where it is: "
                "--python /path/to/python"
            )
        return f"Host {name}: the agent ended with exit code {code}. Its last words: {last}."

    def check(self, told: Mapping[str, Any]) -> None:
        """Raise SetupFailed for an agent that this notebook cannot work with."""
        name = self._name
        if "failed" in told:
            raise SetupFailed(f"Host {name}: {told['failed']}")
        version = sys.modules["ddp_notebook"].__version__
        path = shlex.quote(str(told.get("path") or self._python))
        install = f"On {name}, type: {path} -m pip install ddp-notebook=={version}"
        if "lacking" in told:
            raise SetupFailed(
                f"On host {name} {told.get('path') or self._python} cannot load this package: "
                f"{told['lacking']} is missing. {install}. Or name another Python there: --python"
            )
        here = sys.version.split()[0]
        if "python" in told and _minor(str(told["python"])) != _minor(here):
            raise SetupFailed(
                f"Host {name} has Python {told['python']}, and the notebook {here}: what they send "
                f"each other is only read by the same minor version. Name another one there: "
                f"--python /path/to/python{_minor(here)}"
            )
        if "product" in told and told["product"] != version:
            raise SetupFailed(
                f"Host {name} has ddp_notebook {told['product']}, and the notebook {version}. "
                f"They must be the same. {install}"
            )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
