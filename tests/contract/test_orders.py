"""Orders reach the process they are for, from this session alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_notebook.cluster import order_sender
from ddp_notebook.cluster.order_sender import OrderSender
from ddp_notebook.model import codec
from ddp_notebook.rank import calls
from ddp_notebook.rank.orders import OrderSocket

KEY = "11" * 32
CELL = calls.Cell(7, 3, "%%ddp", "print('\u00e9')\n")


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[OrderSender]:
    made = OrderSender(tmp_path, KEY)
    yield made
    made.close()


@pytest.fixture
def rank(sender: OrderSender) -> Iterator[OrderSocket]:
    made = OrderSocket(sender.url, KEY)
    yield made
    made.close()


def test_an_order_arrives_as_it_was_given(sender: OrderSender, rank: OrderSocket) -> None:
    assert sender.send({0: os.getpid()}, calls.RUN_CELL, CELL) == ()
    order = rank.read(rank.socket.recv_multipart())
    assert order is not None
    assert order["order"] == calls.RUN_CELL.name
    assert codec.decode(calls.Cell, order["request"]) == CELL


def test_what_is_not_signed_with_the_sessions_key_is_not_carried_out(
    sender: OrderSender, rank: OrderSocket
) -> None:
    sender._key = b"a stranger's"
    assert sender.send({0: os.getpid()}, calls.RUN_CELL, CELL) == ()
    assert rank.read(rank.socket.recv_multipart()) is None
    assert rank.read([b"one frame"]) is None


def test_a_process_that_is_not_there_cannot_be_reached(
    sender: OrderSender, rank: OrderSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order_sender, "_CONNECTED_WITHIN_S", 0.05)
    assert sender.send({0: os.getpid(), 1: 1}, calls.RUN_CELL, CELL) == (1,)
