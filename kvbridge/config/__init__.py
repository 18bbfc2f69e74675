"""Settings of an operator, and the way from files, variables and flags to a valid object."""
