"""What a node decides: rooms, admission, handshakes with peers, the engine API."""
