"""Where our code on a rank reads a tensor, and what keeps it from waiting for a GPU.

`gpu.is_readable` and `gpu.await_work` are the only two that ask. The benchmark measures GPUs and is
left out. What runs is tested with a stand-in (`test_nothing_of_ours_reads_a_value_...`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from ddp_notebook import rank

READS = {"item", "tolist", "cpu", "numpy", "equal", "allclose", "isfinite", "synchronize"}
ON_HOST = "only where `is_cpu` or `device` says that it is the host's"
ASKED = "only where `gpu.is_readable` says so"
AWAITED = "after `gpu.await_work`"
ALLOWED = {
    "cells/values.py _sendable": ASKED,
    "collectives/splits.py _counts": ON_HOST,
    "debugger/not_finite.py _not_finite": AWAITED,
    "inspect/safe_repr.py _text": ON_HOST,
    "inspect/tensor_values.py _blocks_of": ON_HOST,
    "inspect/tensor_values.py _numbers": ON_HOST,
    "inspect/tensor_values.py add": ON_HOST,
    "inspect/tensor_values.py checksums": ON_HOST,
    "inspect/variables.py _described": "a number of NumPy's",
    "inspect/variables.py _optimizer": ON_HOST,
    "setup/stages.py verify": AWAITED,
    "training/ddp.py hash_of": AWAITED,
    "training/digests.py _norm_and_sample": ASKED,
    "training/digests.py digest": ASKED,
    "training/digests.py spread": ASKED,
    "training/fsdp_private.py along": "a mesh's ranks, which lie on the host",
    "training/fsdp_private.py sharded_in": "a mesh's ranks, which lie on the host",
    "training/fsdp_private.py spec": "a mesh's ranks, which lie on the host",
    "training/fsdp_private.py units": "a mesh's ranks, which lie on the host",
    "training/inputs.py _hashes": ON_HOST,
    "training/inputs.py _statistics": ON_HOST,
    "training/inputs.py hash_of": ON_HOST,
    "training/inputs.py random_state": "of the host's generator",
    "training/ledger.py _local": AWAITED,
    "training/tracker.py __init__": ASKED,
    "training/tracker.py backward": ON_HOST,
    "training/tracker.py bucket": ON_HOST,
}


def reads(node: ast.AST, function: str = "") -> Iterator[str]:
    """The functions in which a tensor may be read; the standard library's `math` reads none."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef(name=name):
                yield from reads(child, name)
                continue
            case ast.Call(func=ast.Attribute(attr=name, value=of)) if name in READS:
                if not (isinstance(of, ast.Name) and of.id == "math"):
                    yield function
        yield from reads(child, function)


def test_each_place_that_reads_a_tensor_says_why_it_does_not_wait_for_a_gpu() -> None:
    root = Path(rank.__file__).parent
    found = {
        f"{path.relative_to(root).as_posix()} {function}"
        for path in root.rglob("*.py")
        if path.parent.name != "bench"
        for function in reads(ast.parse(path.read_text()))
    }
    assert found == ALLOWED.keys()
