"""A hook of MkDocs: links from pages to files outside ``docs/`` become their paths, which a site does not have.

On GitHub, and in an editor, the same pages link to the files themselves.
"""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Returns the page with such links replaced; called by MkDocs for every page."""
    return OUTSIDE.sub(_path, markdown)


def _path(link: re.Match[str]) -> str:
    text, path = link[1], link[2]
    if path == "README.md":
        return f"[{text}](index.md)"
    return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"
