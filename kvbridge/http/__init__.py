"""The HTTP APIs: applications, the server that runs them, and clients for both."""
