"""`python -m potluck` is the `potluck` command."""

from potluck.cli.app import main

if __name__ == "__main__":
    main()
