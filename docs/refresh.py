"""Write the generated parts of the documentation: `python -m docs.refresh`, or `--check` to compare only.

A generated part stands between `<!-- generated: NAME ... -->` and `<!-- end: NAME -->`; everything else on a page is
written by hand. A page that lacks, or has no markers for, a part is left alone: pages choose what they show.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import msgpack

from schemas.access import access_table, acl_commands
from schemas.diagram import flowchart, table
from schemas.diagram import way as travelled
from schemas.topics import DEFAULT_PREFIX
from schemas.wire_page import wire_page

ROOT = Path(__file__).parent.parent
"""Of the repository."""

PAGES = ("README.md", "ARCHITECTURE.md", "docs/security.md", "docs/wire.md")
"""Pages with generated parts."""

TASK_BYTES = ROOT / "tests" / "golden" / "v1" / "rollmill.task.msgpack"
"""The golden task, which the wire page shows."""

PART = re.compile(r"(<!-- generated: (?P<name>\S+).*? -->\n)(?P<body>.*?)(<!-- end: (?P=name) -->)", re.DOTALL)
"""A generated part with its markers."""


def flow() -> str:
    """Return the picture of the flow."""
    return f"```mermaid\n{flowchart()}```\n"


def acls() -> str:
    """Return the access control lists of one service, as commands."""
    return f"```sh\n{acl_commands('run', prefix=DEFAULT_PREFIX, user='rollmill-run')}```\n"


def way() -> str:
    """Return the same without what every service writes or reads."""
    return f"```mermaid\n{flowchart(travelled())}```\n"


def task() -> str:
    """Return the golden task, as fields and as bytes."""
    data = TASK_BYTES.read_bytes()
    fields = json.dumps(msgpack.unpackb(data), indent=2, ensure_ascii=False)
    hexed = "\n".join(textwrap.wrap(data.hex(), 96))
    return f"```json\n{fields}\n```\n\nIts {len(data)} bytes, in hex:\n\n```text\n{hexed}\n```\n"


PARTS: dict[str, Callable[[], str]] = {
    "access": access_table,
    "acls": acls,
    "flow": flow,
    "way": way,
    "reference": wire_page,
    "task": task,
    "topics": table,
}


def refreshed(page: str) -> str:
    """Return a page with its generated parts as they should be."""
    return PART.sub(lambda found: f"{found[1]}\n{PARTS[found['name']]()}\n{found[4]}", page)


def main(arguments: list[str]) -> int:
    """Write the pages that are stale, or name them; the exit status tells whether any was."""
    stale = []
    for path in (ROOT / page for page in PAGES if (ROOT / page).exists()):
        old = path.read_text(encoding="utf-8")
        new = refreshed(old)
        if new != old:
            stale.append(path)
            if "--check" not in arguments:
                path.write_text(new, encoding="utf-8")
    for path in stale:
        sys.stdout.write(f"stale: {path.relative_to(ROOT)}\n")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
