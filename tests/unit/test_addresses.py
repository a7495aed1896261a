"""Loopback addresses of a session's own."""

from __future__ import annotations

import ipaddress
import random
import socket
import sys
from pathlib import Path

import pytest

from ddp_notebook.launch import addresses


def test_sessions_on_one_host_do_not_share_an_address() -> None:
    made = {addresses.own_loopback() for _ in range(50)}
    assert all(ipaddress.ip_address(each).is_loopback for each in made)
    if sys.platform == "linux":
        assert len(made) >= 49


def test_learners_who_seed_alike_do_not_share_an_address_nor_lose_their_numbers() -> None:
    random.seed(7)
    before, first = random.getstate(), addresses.own_loopback()
    addresses.free_port(first)
    assert random.getstate() == before
    if sys.platform == "linux":
        assert addresses.own_loopback() != first


def test_a_port_is_free_and_not_one_that_connections_get() -> None:
    for host in ("127.0.0.1", "localhost"):
        port = addresses.free_port(host)
        socket.create_server((host, port)).close()
        if sys.platform == "linux":
            ephemeral = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
            assert port < int(ephemeral.split()[0])
    with pytest.raises(socket.gaierror):
        addresses.free_port("no-such-host.invalid")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one loopback address")
def test_a_port_that_is_taken_on_one_address_is_free_on_another() -> None:
    with socket.create_server((addresses.own_loopback(), 0)) as one:
        port = one.getsockname()[1]
        with socket.create_server((addresses.own_loopback(), port)):
            pass


def test_without_addresses_of_its_own_it_is_the_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: tuple[str, int]) -> socket.socket:
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(socket, "create_server", refuse)
    assert addresses.own_loopback() == "127.0.0.1"
