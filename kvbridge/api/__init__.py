"""The requests and answers of every HTTP API; field names are its JSON names."""
