"""`python -m pevdn`."""

from pevdn.cli import main

if __name__ == "__main__":
    main()
