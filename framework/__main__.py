"""`python -m framework` is the `dike` command."""

from framework.cli import main

if __name__ == "__main__":
    main()
