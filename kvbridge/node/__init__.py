"""The decisions of a node: rooms, admission, handshakes with peers, the engine API."""
