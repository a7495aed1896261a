"""Checks of whether DDP can work here, made before anything starts.

checks.py       the checks, of software, network and machine: functions of facts
gpu_checks.py   those of GPUs: visible, full, divided, and what joins them
examination.py  finds the facts and makes all checks in order: what `%ddp_doctor` calls
schema.json     the form of the report as JSON
"""

from ddp_notebook.doctor.examination import examine

__all__ = ["examine"]
