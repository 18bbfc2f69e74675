"""What breaks on hosts and between them, looked for before it does; and how fast bytes go from here to a peer.

Facts of this host are read in `host/`, judged by pure functions in `checks/` against what a configuration needs (`needs.py`),
and the table of all checks is `table.py`. `bench/` moves bytes to a peer through the transports.
"""
