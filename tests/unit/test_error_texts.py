"""What people paste: error texts of torch, gloo, NCCL and torchrun lead to what caused them."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from ddp_notebook.__main__ import main
from ddp_notebook.diagnosis import error_texts

TEXTS = {
    "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:45678": "rank-died",
    "RuntimeError: Connection reset by peer": "exception-on-one-rank",
    "Broken pipe": "early-exit",
    "message: address already in use, name: EADDRINUSE": "port-in-use",
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12)": "conditional-collective",
    "Watchdog got stuck for 480 seconds without making progress": "uneven-inputs",
    "Expected to have finished reduction in the prior iteration": "unused-params",
    "Expected to mark a variable ready only once": "checkpoint-reentrant",
    "Timed out after 61 seconds waiting for clients. 1/2 clients joined.": "missing-rank",
    "The client socket has timed out after 60s": "unreachable-master",
    "wait timeout after 60000ms, keys: /default_pg/0//1//cpu": "duplicate-rank",
    "torch.distributed.DistStoreError: Socket Timeout": "world-size-mismatch",
    "Timed out waiting 1800000ms for recv operation to complete": "straggler",
    "Unable to find address for: eth7": "wrong-interface",
    "ncclSystemError: System call (socket, malloc, munmap, etc) failed": "resource-starved",
    "ncclRemoteError: A call failed possibly due to a network error": "rank-died",
    "ncclUnhandledCudaError: Call to CUDA function failed.": "gpu-mapping",
    "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 10": "gpu-mapping",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError": "oom-on-one-rank",
    "exitcode  : -9 (pid: 4711)": "oom-on-one-rank",
    "SignalException: Process 71 got signal: 1": "SIGHUP",
    "trying to initialize the default process group twice!": "double-init",
    "Default process group has not been initialized": "destroy_process_group",
    "WARNING: destroy_process_group() was not called before program exit": "missing-destroy",
    "RendezvousTimeoutError": "missing-rank",
    "RendezvousConnectionError: The connection to the C10d store has failed.": "unreachable-master",
    "DDP expects same model across all ranks, but Rank 1 has 3 params": "param-mismatch",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB": "oom-on-one-rank",
    "OSError: [Errno 24] Too many open files": "resource-starved",
    "No backend type associated with device type cpu": "backend-device-mismatch",
    "Detected mismatch between collectives on ranks. Rank 0 is running": "mismatched-order",
    "[rank0]: Rank 1 failed to pass monitoredBarrier in 2000 ms": "conditional-collective",
}


@pytest.mark.parametrize(("text", "leads_to"), TEXTS.items())
def test_each_text_leads_somewhere(text: str, leads_to: str) -> None:
    assert leads_to in (error_texts.explain(f"[rank3]: {text}\n") or "")


def test_the_command_line_explains_a_text_a_category_a_file_and_what_comes_by_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert main(["explain", "Duplicate", "GPU", "detected", ": rank 1 and rank 0"]) == 0
    assert "[gpu-mapping]" in capsys.readouterr().out
    assert main(["explain", "straggler"]) == 0
    assert capsys.readouterr().out.startswith("straggler\n")
    log = tmp_path / "rank-0.log"
    log.write_bytes(b"step 3\n\xff\nBroken pipe\n\x1b[31mEADDRINUSE\n")
    assert main(["explain", str(log)]) == 0
    out = capsys.readouterr().out
    assert "`Broken pipe`" in out and "[port-in-use]" in out and "\x1b" not in out
    monkeypatch.setattr("sys.stdin", io.StringIO("0/4 clients joined"))
    assert main(["explain"]) == 0
    assert "Possible causes: missing-rank" in capsys.readouterr().out
    quoted = f"Watchdog caught collective operation timeout /{'x' * 300}/"
    assert main(["explain", quoted]) == 0, "too long for the name of a file"
    assert "straggler" in capsys.readouterr().out
    assert main(["explain", "stragler"]) == 3
    assert "Did you mean straggler" in capsys.readouterr().err
