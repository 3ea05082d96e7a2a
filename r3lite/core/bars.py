"""How progress bars look, as arguments of tqdm. On a terminal only; nothing is drawn into a file."""

# A bar within other work: it appears after two seconds, and leaves nothing behind.
BRIEF = {"delay": 2, "leave": False, "disable": None}


def named(progress: str | None, otherwise: str) -> dict:
    """Returns a bar with the name that the caller gave it, which stays; without one a brief bar, named `otherwise`."""
    if progress:
        return {"desc": progress, "disable": None}
    return {"desc": otherwise, **BRIEF}
