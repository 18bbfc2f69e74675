"""What an operator can set, and the way from files, variables and flags to a valid object."""
