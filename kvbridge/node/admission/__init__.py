"""Admission: caps, the queue for pages, and when to try again."""
