"""The ranks as engines of ipyparallel; the one room that knows it.

cluster.py              The only file outside `launch` that knows ipyparallel: controller, clien
engine.py               ipyparallel's engine and controller, as functions that a child can be to
event_receiver.py       The session's ear: receives what beacons send, on a socket that only thi
ipyparallel_private.py  The one place that uses private API of ipyparallel's client, each checke
launchers.py            ipyparallel launchers that start the controller and the engines through
"""
