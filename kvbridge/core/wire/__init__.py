"""Messages between kvbridge processes, their frames, and their reliable delivery."""
