"""Orders reach the process they are for, in its loop, one after the other."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

from ddp_notebook.cluster import questions
from ddp_notebook.cluster.questions import OrderSender
from ddp_notebook.model import codec
from ddp_notebook.rank import calls
from ddp_notebook.rank.control_socket import ControlSocket
from ddp_notebook.rank.orders import Orders

CELL = calls.Cell(7, 3, "%%ddp", "print('\u00e9')\n")
TO = calls.RUN_CELL


@pytest.fixture
def sender() -> Iterator[OrderSender]:
    made = OrderSender()
    yield made
    made.close()


class Rank:
    """What a rank has of it: a socket, and a loop that carries out what comes."""

    def __init__(self, path: Path) -> None:
        self.carried_out: list[tuple[str, Any]] = []
        self.socket = ControlSocket(path, lambda *_: {"answer": 1})
        self.orders = Orders(lambda name, request: self.carried_out.append((name, request)))
        self.socket.take_orders = self.orders.take

    async def attach(self) -> None:
        self.orders.attach()
        self.socket.listen()

    async def after(self, count: int) -> list[calls.Cell]:
        """What was to be run, once there were so many orders."""
        for _ in range(3000):
            if len(self.carried_out) >= count:
                break
            await asyncio.sleep(0.01)
        assert [name for name, _ in self.carried_out] == [TO.name] * count
        return [codec.decode(calls.Cell, request) for _, request in self.carried_out]


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path / "ask-0")
    yield made
    made.socket.close()


def run_in_thread(main: Coroutine[Any, Any, None]) -> None:
    """Run `main` in a loop of its own; in this thread a browser's, once it was used, runs on."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, main).result()


def test_orders_arrive_as_they_were_given_however_long(sender: OrderSender, rank: Rank) -> None:
    to = {0: (os.getpid(), rank.socket.path)}
    cells = [CELL, calls.Cell(8, 4, "%%ddp", "x" * 1_000_000), calls.Cell(9, 5, "%%ddp", "")]

    async def main() -> None:
        await rank.attach()
        for cell in cells:
            assert await asyncio.to_thread(sender.send, to, TO, cell) == ()
            rank.socket.path.unlink(missing_ok=True)  # the connection stays
        assert await rank.after(3) == cells

    run_in_thread(main())


def test_what_one_order_sets_of_context_variables_the_next_one_finds(
    sender: OrderSender, rank: Rank
) -> None:
    counted: ContextVar[int] = ContextVar("counted", default=0)
    of_both: list[int] = []

    def count(*_: Any) -> None:
        counted.set(counted.get() + 1)
        of_both.append(counted.get())
        rank.carried_out.append((TO.name, codec.encode(CELL)))

    rank.orders = Orders(count)
    rank.socket.take_orders = rank.orders.take

    async def main() -> None:
        await rank.attach()
        for _ in range(2):
            sender.send({0: (os.getpid(), rank.socket.path)}, TO, CELL)
        await rank.after(2)

    run_in_thread(main())
    assert of_both == [1, 2]


def test_an_order_for_a_process_that_was_replaced_is_not_carried_out(
    sender: OrderSender, rank: Rank
) -> None:
    async def main() -> None:
        await rank.attach()
        sender.send({0: (os.getppid(), rank.socket.path)}, TO, CELL)
        sender.send({0: (os.getpid(), rank.socket.path)}, TO, CELL)
        await rank.after(1)

    run_in_thread(main())


def test_a_process_that_has_ended_is_reached_no_more_and_the_one_in_its_place_is(
    sender: OrderSender, rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions, "_LISTENS_WITHIN_S", 0.05)
    to = {0: (os.getpid(), rank.socket.path), 1: (1, rank.socket.path.with_name("ask-1"))}

    async def once() -> None:
        await rank.attach()
        assert await asyncio.to_thread(sender.send, to, TO, CELL) == (1,)
        await rank.after(1)

    async def ended() -> None:
        rank.socket.close()
        (connection,) = sender._connections.values()
        connection.close()  # as the system does at its end
        assert await asyncio.to_thread(sender.send, to, TO, CELL) == (0, 1)

    run_in_thread(once())
    run_in_thread(ended())
    rank.carried_out.clear()
    run_in_thread(once())
