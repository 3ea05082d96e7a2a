"""Takes out of a text what would name its user: paths, and the names of the user and of the machine."""

import getpass
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import r3lite

# A path: in quotes, where it may have blanks, or else from its beginning to the next blank. Not the `/` of a unit.
PATH = re.compile(r"""(['"])[^'"\n]*[/\\][^'"\n]*\1|(?<![\w./\\:<])(?:[A-Za-z]:)?[/\\]{1,2}[\w.~-][^\s'",;)]*""")


def hider(folders: list[str], names: list[str]) -> Callable[[str], str]:
    """A function that takes paths out of a text, and the names of the user and of the machine."""
    known = sorted({folder for folder in folders if len(folder) > 1}, key=len, reverse=True)  # the longest first
    words = [re.compile(rf"(?<!\w){re.escape(name)}(?!\w)", re.IGNORECASE) for name in names if name]

    def hide(text: str) -> str:
        for folder in known:
            text = text.replace(folder, "/folder")
        text = PATH.sub("<path>", text)
        for word in words:
            text = word.sub("<name>", text)
        return text

    return hide


def users_own() -> Callable[[str], str]:
    """A `hider` of this process's folders and of its user."""
    package = str(Path(r3lite.__file__).parent)
    folders = [os.path.expanduser("~"), os.getcwd(), tempfile.gettempdir(), sys.prefix, package]
    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):  # a user without a name
        user = ""
    home = Path.home().name
    return hider(folders, [user, home, platform.node(), platform.node().partition(".")[0]])
