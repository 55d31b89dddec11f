"""`python -m truenext` is the `truenext` command."""

from truenext.cli.main import main

if __name__ == "__main__":
    main()
