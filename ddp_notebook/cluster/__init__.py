"""Runs the ranks as engines of ipyparallel; the only room that uses it.

cluster.py              The ranks as engines of one ipyparallel cluster.
controller.py           ipyparallel's controller, as a function that a child can call.
engine.py               ipyparallel's engine, as a function that a child can call.
event_receiver.py       Receives the ranks' events in the session.
ipyparallel_private.py  Every use of the private API of ipyparallel's client.
launchers.py            ipyparallel launchers that use the fork server.
order_sender.py         Sends orders to run something to the ranks' processes.
questions.py            Asks processes questions at their unix sockets, all at once.
rank_cluster.py         The interface of a session to the processes of its ranks.
"""
