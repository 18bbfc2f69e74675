"""Rooms of a prefill node: offers, orders to rank workers, Done."""
