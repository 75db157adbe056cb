"""``python -m piecework``."""

from piecework.tools.cli import main

if __name__ == "__main__":
    main()
