"""Ctrl-C and SIGTERM in the middle of training: when they may stop a step, and when the step must end first."""

import contextlib
import signal
import threading
from collections.abc import Iterator

from r3lite.core.exit_status import Terminated
from r3lite.devices.precision import Precision
from r3lite.devices.ranks import ALONE, Ranks


class Interrupts:
    """Raises KeyboardInterrupt or Terminated at once if the current step has changed no weight, else after the step.

    A step that has begun to change weights could not be resumed exactly, so it is completed; the interruption waits in
    `pending` until then. A second Ctrl-C raises at once, and the step is lost. An update that has begun on several
    ranks is completed even where no weight has changed yet: another rank may complete it.
    """

    def __init__(self, precision: Precision, ranks: Ranks = ALONE):
        self.precision = precision
        self.ranks = ranks
        self.inside_step = False
        self.pending: type[BaseException] | None = None

    def __enter__(self) -> "Interrupts":
        self.previous = {}
        if threading.current_thread() is threading.main_thread():  # the only one that may have handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self.previous[number] = signal.signal(number, self._arrived)
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _arrived(self, number, frame) -> None:
        is_second = self.pending is not None
        self.pending = KeyboardInterrupt if number == signal.SIGINT else Terminated
        update_began = self.precision.changed_weights or self.precision.updating
        can_undo_step = self.inside_step and not update_began
        self.inside_step = False
        if can_undo_step or (is_second and number == signal.SIGINT):
            raise self.pending

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """The context of one step. When it begins, the step has changed no weights."""
        self.precision.changed_weights = False
        self.precision.updating = False
        self.inside_step = True
        try:
            self.raise_if_interrupted()
            yield
        finally:
            self.inside_step = False

    def any_rank_interrupted(self) -> bool:
        """Returns True if the run stops after this step: if one rank was interrupted, all stop after the same step."""
        if self.ranks.any(self.pending is not None):
            self.pending = self.pending or Terminated
        return self.pending is not None

    def raise_if_interrupted(self) -> None:
        """Raises the interruption that waits, if there is one."""
        if self.pending:
            raise self.pending
