"""How nodes get to know each other before the first room."""
