"""The checks, a module for each family: facts and needs in, findings out. None of them touches the host."""
