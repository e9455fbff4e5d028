"""Hooks of MkDocs: links to files outside ``docs/`` become their paths, and the command line page gets every option.

On GitHub, and in an editor, such links lead to the files themselves.
"""

from __future__ import annotations

import inspect
import posixpath
import re
from typing import Any

import click

OUTSIDE = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#]+)(?:#[^)]*)?\)")
COMMANDS = "<!-- commands -->"


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replaces links and the mark for the reference of commands; called by MkDocs for every page."""
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")
    text = OUTSIDE.sub(lambda link: _path(link, folder), markdown)
    return text.replace(COMMANDS, command_reference()) if COMMANDS in text else text


def _path(link: re.Match[str], folder: str) -> str:
    path = posixpath.normpath(f"{folder}/{link[2]}")
    if path.startswith("docs/"):
        return link[0]
    if path == "README.md":
        return f"[{link[1]}](index.md)"
    return f"`{path}`" if link[1].strip("`") == path else f"{link[1]} (`{path}`)"


def command_reference() -> str:
    """Markdown with the help and the options of every command of ``esper``."""
    from esper.cli.group import group

    root = click.Context(group, info_name="esper")
    return "\n".join(_section(name, group, root) for name in group.list_commands(root))


def _section(name: str, group: click.Group, root: click.Context) -> str:
    command = group.get_command(root, name)
    assert command is not None
    context = click.Context(command, info_name=name, parent=root)
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [f"### esper {name}", "", f"`esper {name} {usage}`", "", inspect.cleandoc(command.help or ""), ""]
    lines += ["| option | meaning |", "|---|---|"]
    for option in command.get_params(context):
        if record := option.get_help_record(context):
            names, meaning = (" ".join(text.split()).replace("|", "\\|") for text in record)
            lines.append(f"| `{names}` | {meaning} |")
    return "\n".join([*lines, ""])
