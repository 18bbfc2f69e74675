"""Bytes moved to a peer for a trial: one side lends memory (`lender.py`), the other writes there and measures."""
