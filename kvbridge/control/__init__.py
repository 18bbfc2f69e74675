"""The sockets between kvbridge processes: peers over TCP with CURVE keys, a node's own processes over ipc."""
