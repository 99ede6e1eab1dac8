"""Generate the log of clicks that `make demo` goes from, and a new user's rows for its last step.

    python tools/dev/demo_clicks.py FOLDER

writes ``part-0.parquet``, ``part-1.parquet`` and ``new_user.json`` into FOLDER.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from support.data_files import click_log, write_parts

USERS, NEW_USER = 400, "user-400"


def main(folder: Path) -> None:
    """Write the files: of one user more than the log has, all rows go beside it."""
    table = click_log(USERS + 1)
    new = [row for row in table.to_pylist() if row["user_id"] == NEW_USER]
    write_parts(table.filter([user != NEW_USER for user in table["user_id"].to_pylist()]), folder)
    (folder / "new_user.json").write_text(json.dumps(new))
    print(f"{table.num_rows - len(new):,} rows of {USERS} users, and {len(new)} of a new one: {folder}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    main(parser.parse_args().folder)
