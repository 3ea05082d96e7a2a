"""The one exception a user should see."""


class R3LiteError(Exception):
    """A foreseeable failure: what went wrong, and what the user can do about it.

    Commands print both lines without a traceback and exit with status 1.
    """

    def __init__(self, cause: str, remedy: str = ""):
        super().__init__(f"{cause}\n  {remedy}" if remedy else cause)
        self.cause = cause
        self.remedy = remedy
