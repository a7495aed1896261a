"""Orders reach the process they are for."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_notebook.cluster import channels
from ddp_notebook.cluster.channels import OrderSender
from ddp_notebook.model import codec
from ddp_notebook.rank import calls
from ddp_notebook.rank.orders import OrderSocket

CELL = calls.Cell(7, 3, "%%ddp", "print('\u00e9')\n")


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[OrderSender]:
    made = OrderSender(tmp_path)
    yield made
    made.close()


@pytest.fixture
def rank(sender: OrderSender) -> Iterator[OrderSocket]:
    made = OrderSocket(sender.url)
    yield made
    made.close()


def test_an_order_arrives_as_it_was_given(sender: OrderSender, rank: OrderSocket) -> None:
    assert sender.send({0: os.getpid()}, calls.RUN_CELL, CELL) == ()
    order = json.loads(*rank.socket.recv_multipart())
    assert order["order"] == calls.RUN_CELL.name
    assert codec.decode(calls.Cell, order["request"]) == CELL


def test_a_process_that_is_not_there_cannot_be_reached(
    sender: OrderSender, rank: OrderSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "_CONNECTED_WITHIN_S", 0.05)
    assert sender.send({0: os.getpid(), 1: 1}, calls.RUN_CELL, CELL) == (1,)
