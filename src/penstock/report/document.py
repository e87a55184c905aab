"""The frame of a page: one file, with a policy that lets nothing in from outside and runs no script but its own."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from penstock.report.markup import text

_HERE = Path(__file__).parent


def whole_page(title: str, body: str, scripts: tuple[str, ...]) -> str:
    """`body` is HTML; `scripts` are files beside this one."""
    style = (_HERE / "page.css").read_text(encoding="utf-8")
    sources = [(_HERE / name).read_text(encoding="utf-8") for name in scripts]
    # Allowed by their hashes, so markup that got in through a name could still run nothing.
    allowed = " ".join(f"'sha256-{_sha256(source)}'" for source in sources)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}; base-uri 'none'; form-action 'none'"
    running = "".join(f"<script>{source}</script>\n" for source in sources)
    return (
        "<!DOCTYPE html>\n"
        '<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{text(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n{body}{running}</body>\n</html>\n"
    )


def _sha256(source: str) -> str:
    return base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
