"""Entry point of `python -m truenext`: the `truenext` command."""

from truenext.cli.main import main

if __name__ == "__main__":
    main()
