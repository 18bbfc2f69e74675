"""The entry point: `kvbridge`, and `python -m kvbridge`."""

import os

from kvbridge.cli.signals import interrupts_end_at_once


def main() -> None:
    """Run the command line; Ctrl-C ends it with a line and an exit code, also while it is being imported."""
    interrupts_end_at_once()
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # it reads all packages' data to find none
    from kvbridge.cli.main import main as run  # noqa: PLC0415 - see above

    run()


if __name__ == "__main__":
    main()
