"""The ranks as engines of ipyparallel; the one room that knows it.

cluster.py              The seam to the ranks' processes, and ipyparallel behind it.
engine.py               ipyparallel's engine and controller, as functions to be called in a child.
event_receiver.py       The event receiver of the session.
ipyparallel_private.py  Every use of the private API of ipyparallel's client.
launchers.py            ipyparallel launchers that use the fork server.
order_sender.py         Orders to run something, to the ranks' processes.
questions.py            Asks processes questions at their unix sockets, all at once.
"""
