"""Entry point of the `truenext` command, and of `python -m truenext`."""

import sys

from truenext.cli import early_signals


def main() -> None:
    """Run the command. Signals are handled first, because importing the command's modules takes a while."""
    early_signals.listen(sys.argv[1:])
    from truenext.cli.main import main as command

    command()


if __name__ == "__main__":
    main()
