"""How progress bars look, as arguments of tqdm. On a terminal only; nothing is drawn into a file."""

# A bar within other work: it appears after two seconds, and leaves nothing behind.
BRIEF = {"delay": 2, "leave": False, "disable": None}


def named(progress: str | None, otherwise: str) -> dict:
    """A bar with the name that the caller gave it, which stays; without one a brief bar, named `otherwise`."""
    return {"desc": progress, "disable": None} if progress else {"desc": otherwise, **BRIEF}
