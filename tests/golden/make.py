"""Write the golden bytes of samples that have none yet: `python -m tests.golden.make`.

Existing files are never touched. If one no longer matches, the contract changed: a reader of today may be unable to
read what lies in the log. Add the field with a default, move the file to `older/` and say in `OLDER` what it means; or
make it a new type. Delete a file only before a release.
"""

from __future__ import annotations

import sys

from schemas.codec import encode
from tests.golden.samples import SAMPLES, golden_file


def main() -> None:
    """Write what is missing and name it."""
    for name, message in SAMPLES.items():
        path = golden_file(name)
        if not path.exists():
            path.write_bytes(encode(message))
            sys.stdout.write(f"wrote {path}\n")


if __name__ == "__main__":
    main()
