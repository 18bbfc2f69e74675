"""What a daemon says about itself: metrics, logs, traces."""
