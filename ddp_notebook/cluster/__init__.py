"""Runs the ranks as engines of ipyparallel; the only room that uses it.

channels.py             Receives the ranks' events.
cluster.py              The ranks as engines of one ipyparallel cluster.
controller.py           ipyparallel's controller, as a function that a child can call.
engine.py               ipyparallel's engine, as a function that a child can call.
ipyparallel_private.py  Every use of the private API of ipyparallel's client.
questions.py            Asks ranks at their control sockets, all at once, and sends them orders.
rank_cluster.py         The interface of a session to the processes of its ranks.
"""
