"""``python -m gmeta`` is the ``gmeta`` command."""

from gmeta.cli import main

if __name__ == "__main__":
    main(prog_name="gmeta")
