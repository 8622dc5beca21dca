"""The command line: `rorqual VERB ...`, one verb a file, each imported only when it is called."""

from rorqual.cli.app import main

__all__ = ["main"]
