"""The pages that a store keeps on disk, of every model that used the folder: `rorqual store`.

None of the verbs needs the model, or torch. Only `stat` may be called while a server has the store open.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rorqual.cli.app import Verb
from rorqual.cli.output import Facts, ProgressLine, bytes_text, print_json, print_table
from rorqual.errors import InputError
from rorqual.store import upkeep
from rorqual.store.folder import FORMAT

VERBS: tuple[Verb, ...] = (
    Verb(name="stat", target="rorqual.cli.store:stat", help="Show whose pages a store holds, and how many"),
    Verb(name="verify", target="rorqual.cli.store:verify", help="Read every page and remove damaged ones"),
    Verb(name="compact", target="rorqual.cli.store:compact", help="Give back the room of pages that are gone"),
    Verb(name="clear", target="rorqual.cli.store:clear", help="Remove every page of every model"),
)
COLUMNS = ("subfolder", "model", "page_tokens", "page_bytes", "pages", "tokens")
SHOWN = 16
"""Characters of a model's fingerprint."""

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The store's folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def stat(folder: Folder, as_json: AsJson = False) -> None:
    """Show every model and format that has pages in the folder; also while a server has it open."""
    found = upkeep.held(folder)
    rows = [_facts(one) for one in found]
    if as_json:
        print_json(rows)
    elif rows:
        cells = [
            [*(row[name] for name in COLUMNS), bytes_text(one.used), row["note"]]
            for one, row in zip(found, rows, strict=True)
        ]
        print_table((*(name.replace("_", " ") for name in COLUMNS), "on disk", ""), cells, title=str(folder))
    else:
        print("no pages")


def _facts(one: upkeep.Held) -> Facts:
    identity = one.identity
    return {
        "subfolder": one.path.name,
        "model": None if identity is None else identity.fingerprint[:SHOWN],
        "page_tokens": None if identity is None else identity.page_tokens,
        "page_bytes": None if identity is None else identity.page_bytes,
        "pages": one.pages,
        "tokens": None if identity is None or one.pages is None else one.pages * identity.page_tokens,
        "used": one.used,
        "note": _note(one),
    }


def _note(one: upkeep.Held) -> str:
    if one.format != FORMAT:
        return f"of format {one.format}, this one reads {FORMAT}: left alone"
    if one.identity is None:
        return "does not say whose pages these are"
    return "its index cannot be read" if one.pages is None else ""


def verify(folder: Folder, as_json: AsJson = False) -> None:
    """Read every page and compare it with its check. Damaged pages are removed; exit 1 if there were any."""
    with ProgressLine("verifying pages") as progress:
        found = upkeep.verify(folder, progress)
    damaged = sum(one.damaged for one in found)
    if as_json:
        print_json([{"subfolder": one.path.name, "checked": one.checked, "damaged": one.damaged} for one in found])
    else:
        for one in found:
            print(f"{one.path.name}: {one.checked:,} pages read, {one.damaged:,} damaged")
        print("damaged pages are gone" if damaged else "all is well")
    if damaged:
        raise typer.Exit(1)


def compact(folder: Folder) -> None:
    """Move pages together, so that files hold none that are gone."""
    for path, shrunk in upkeep.compact(folder).items():
        print(f"{path.name}: {bytes_text(max(0, shrunk))} given back")


def clear(
    folder: Folder, yes: Annotated[bool, typer.Option("--yes", help="Do not ask before all pages are removed.")] = False
) -> None:
    """Remove all pages, those of other models and formats too. The folder stays, and whatever else is in it."""
    found = upkeep.held(folder)
    if not found:
        print("no pages")
        return
    size = bytes_text(sum(one.used for one in found))
    if not yes:
        if not sys.stdin.isatty():
            raise InputError(f"yes: {size} of pages would be removed, and nobody can be asked; legal: --yes")
        if not typer.confirm(f"Remove {size} of pages of {len(found)} models or formats from {folder}?"):
            raise typer.Exit(1)
    upkeep.clear([one.path for one in found])
    print(f"{size} removed")
