"""Finds problems of hosts and of the way between them before they break a daemon, and measures the rate of bytes to a peer.

Each topic is a file with its facts, their reading from the host, and pure checks that compare them with the needs of a
configuration (`findings.py`). `run.py` has the table of all checks. `bench.py` belongs to `kvbridge bench-peer`.
"""
