"""`python -m kvbridge` is `kvbridge`."""

from kvbridge.cli.main import main

main()
