"""Rooms of a decode node: offers to writers, accounting, verification, fencing, claims."""
