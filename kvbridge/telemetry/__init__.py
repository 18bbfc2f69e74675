"""Facts of a daemon and their readers: metrics, logs, traces."""
