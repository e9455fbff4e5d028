"""`python -m esper` is the command `esper`; torchrun starts ranks by it."""

from esper.cli.main import main

if __name__ == "__main__":
    main()
