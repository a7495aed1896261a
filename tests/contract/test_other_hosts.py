"""Jobs on other hosts, through a real sshd: seen as on this one, and nothing changes in them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from other_hosts import Hosts, need_sshd
from prepared_ranks import ROOT, SCRIPT, found_in, launch, said
from support import eventually, lacking, with_entry_point

from ddp_notebook import __main__
from ddp_notebook.errors import UsageMistake
from ddp_notebook.jobs import hosts as other_hosts
from ddp_notebook.launch.addresses import free_port
from ddp_notebook.launch.ssh_hosts import SSH_VARIABLE
from ddp_notebook.rank.prepared import job_folder

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    need_sshd()
    folder = tmp_path / "ssh"
    folder.mkdir(mode=0o700)
    made = Hosts(folder)
    monkeypatch.setenv(SSH_VARIABLE, f"ssh -F {made.config}")
    return made


def test_a_job_on_another_host_is_looked_at_as_one_here(
    tmp_path: Path,
    started: list[subprocess.Popen],
    hosts: Hosts,
    shell: Any,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = launch(tmp_path, started, "hang")
    pid = ranks[0].pid
    found_in(pid)
    hosts.add("gpu07", DDP_NOTEBOOK_FOLDER=str(job_folder.root()))
    monkeypatch.setenv(job_folder.FOLDER_VARIABLE, str(tmp_path / "none"))  # not by a look here

    assert f"{pid}  train.py" in said(shell, capsys, "%ddp_attach gpu07:")
    shown = said(shell, capsys, f"%ddp_attach gpu07:{pid}")
    assert shown.startswith(
        f"Attached to job {pid} (train.py) on gpu07: ranks 0 and 1 of 2; it runs."
    )
    shown = said(shell, capsys, "%ddp_why")
    assert "conditional-collective" in shown and "train.py, line 17" in shown
    assert "This stands on: the answers of ranks 0 and 1, and their records" in shown
    assert "on gpu07" in shown
    shown = said(shell, capsys, "%ddp_where --ranks 0 --locals")
    assert "train.py, line 17" in shown and "optimizer = " in shown and "rank 1" not in shown
    shown = said(shell, capsys, "%ddp_board")
    assert f"job {pid} (train.py) on gpu07: ranks 0 and 1 of 2; it runs" in shown
    assert shown.count("  waiting  ") == 2 and "/6" not in shown

    saved = tmp_path / "saved.json"
    assert __main__.main(["save", f"gpu07:{pid}", str(saved)]) == 0
    assert __main__.main(["why", str(saved)]) == 1
    out = capsys.readouterr().out
    assert "train.py, line 17" in out and "(the answers of ranks 0 and 1" in out
    assert __main__.main(["where", "--json", "--locals", f"gpu07:{pid}"]) == 0
    schema = Path(other_hosts.__file__).with_name("schema_where.json").read_text()
    wire = json.loads(capsys.readouterr().out)
    jsonschema.validate(wire, json.loads(schema))
    assert [stack["rank"] for stack in wire["stacks"]] == [0, 1]
    assert all(rank.poll() is None for rank in ranks), "looking changes nothing"


def test_a_job_on_two_hosts_is_judged_as_one(
    tmp_path: Path, started: list[subprocess.Popen], hosts: Hosts, capsys: Capture
) -> None:
    """Each has processes, and files, of its own."""
    if os.getuid() != 0:
        lacking("only root can have other hosts")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {
        **os.environ,
        "DDP_NOTEBOOK": "1",
        "PYTHONPATH": f"{ROOT}:{with_entry_point(tmp_path)}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port("127.0.0.1")),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    alone = ("unshare", "--fork", "--pid", "--mount-proc", "--kill-child")
    job_folder.root().mkdir(mode=0o700)
    for rank in range(2):
        folder = f"{job_folder.root()}/{rank}"
        own = {"RANK": str(rank), "LOCAL_RANK": "0", job_folder.FOLDER_VARIABLE: folder}
        command = [*alone, sys.executable, str(script), "hang"]
        started.append(subprocess.Popen(command, env=environment | own, stdout=subprocess.PIPE))
        init = eventually(lambda: _child(started[-1].pid), 30)
        enter = f"nsenter --target {init} --pid --mount"
        hosts.add(f"node{rank}", within=enter, DDP_NOTEBOOK_FOLDER=folder)

    def found(*words: str) -> Any:
        try:
            verdict = other_hosts.named(words).why()
        except UsageMistake:  # not yet
            return None
        return verdict if verdict.diagnosis.wrong else None

    both = eventually(lambda: found("node0:1", "node1:1"), 120)
    (finding,) = (each for each in both.diagnosis.findings if not each.passing)
    assert (finding.category.value, finding.ranks) == ("conditional-collective", (0,))
    records = ", and their records of collectives, on node"
    assert both.basis == f"the answers of rank 0{records}0; the answers of rank 1{records}1"
    one = other_hosts.named(["node0:1"]).why()
    assert not one.diagnosis.wrong, "what the other host's rank does is not known there"
    assert any("rank 1 was not found on this host" in note for note in one.unread)
    capsys.readouterr()
    assert __main__.main(["where", "--stacks", "node0:1", "node1:1"]) == 0
    shown = capsys.readouterr().out
    assert "train.py, line 17" in shown and "train.py, line 19" in shown


def _child(pid: int) -> int | None:
    words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(words[0]) if words else None


# -- what goes wrong -------------------------------------------------------------------------


def _why_not(name: str, monkeypatch: pytest.MonkeyPatch, there: str = "") -> str:
    if there:
        monkeypatch.setenv(other_hosts.THERE_VARIABLE, there)
    with pytest.raises(UsageMistake) as raised:
        other_hosts.named([name])
    return str(raised.value)


def test_what_ssh_and_the_other_host_refuse_is_said_with_what_to_do(
    tmp_path: Path, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts.add("gpu07", DDP_NOTEBOOK_FOLDER=str(tmp_path / "none"))
    hosts.add("gpu08", key="stranger")

    refused = _why_not("gpu08:7", monkeypatch)
    assert refused.startswith("gpu08 cannot be reached, and no password is asked for here. ")
    assert "ssh says" in refused and "Permission denied" in refused
    assert refused.endswith(f"Try it in a shell: ssh -F {hosts.config} gpu08 true")
    assert "There is no process 4194305 here." in _why_not("gpu07:4194305", monkeypatch)
    assert "is not the name of a host" in _why_not("-oProxyCommand=touch:7", monkeypatch)
    assert "one HOST:PID for each" in _name_error("gpu07:1", "gpu07:2")
    assert "one HOST:PID for each" in _name_error("gpu07:1", "12")
    none = _why_not("gpu07:7", monkeypatch, there="/no/such/ddp-notebook")
    assert "On gpu07 there is no ddp-notebook: it is not /no/such/ddp-notebook" in none
    programs = {
        "greets": "echo hello",
        "newer": """echo '{"traceEvents": [], "ddp_notebook": {"format": "ddp_notebook run", '"""
        """'"version": 9}}'""",
        "fails": "echo 'a library is missing' >&2; exit 1",
    }
    expected = {
        "greets": "the answer of gpu07 is no run of ddp_notebook",
        "newer": "the answer of gpu07 was written by a newer ddp_notebook",
        "fails": "`ddp-notebook save 7 -` failed with exit code 1. Its last words: a library is",
    }
    for name, text in programs.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o700)
        assert expected[name] in _why_not("gpu07:7", monkeypatch, there=str(program))
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    monkeypatch.setattr(other_hosts, "_WITHIN_S", 1.0)
    assert "gpu07 gave no answer within 1 s" in _why_not("gpu07:7", monkeypatch, str(program))
    monkeypatch.setenv(SSH_VARIABLE, "no-such-ssh")
    assert "no-such-ssh is not installed here" in _why_not("gpu07:7", monkeypatch)


def _name_error(*words: str) -> str:
    with pytest.raises(UsageMistake) as raised:
        other_hosts.named(words)
    return str(raised.value)
