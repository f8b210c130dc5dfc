"""``python -m recast`` is the ``recast`` command."""

from recast.cli import main

if __name__ == "__main__":
    main()
