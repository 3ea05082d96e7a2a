"""Ctrl-C and SIGTERM in the middle of training: when they may stop a step, and when the step must end first."""

import contextlib
import signal
import threading
from collections.abc import Iterator

from r3lite.core.command import Terminated
from r3lite.devices.precision import Precision


class Interrupts:
    """Raises KeyboardInterrupt or Terminated at once while a step has changed no weight; else later.

    A step cut in half could not be resumed exactly, so one that has begun to change weights is completed, and the
    loop then finds the interruption in `pending`. A second Ctrl-C raises at once, whatever is lost.
    """

    def __init__(self, precision: Precision):
        self.precision = precision
        self.inside_step = False
        self.pending: type[BaseException] | None = None

    def __enter__(self) -> "Interrupts":
        self.previous = {}
        if threading.current_thread() is threading.main_thread():  # the only one that may have handlers
            self.previous = {s: signal.signal(s, self._arrived) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _arrived(self, number, frame) -> None:
        again, self.pending = self.pending, KeyboardInterrupt if number == signal.SIGINT else Terminated
        harmless, self.inside_step = self.inside_step and not self.precision.changed_weights, False
        if harmless or (again and number == signal.SIGINT):
            raise self.pending

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A step; it is entered with its weights unchanged."""
        self.precision.changed_weights = False
        self.inside_step = True
        try:
            self.leave_if_asked()
            yield
        finally:
            self.inside_step = False

    def leave_if_asked(self) -> None:
        if self.pending:
            raise self.pending
