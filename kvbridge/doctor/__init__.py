"""Finds what breaks on hosts and between them before it breaks; and how fast bytes go from here to a peer.

Each topic is a file: the facts, how they are read from the host, and pure checks that judge them against what a configuration
needs (`needs.py`). `run.py` has the table of all checks. `bench.py` belongs to `kvbridge bench-peer`.
"""
