"""Ctrl-C and SIGTERM as a wish: the step is finished and saved first."""

from __future__ import annotations

import signal
import threading


class Interrupt:
    """`with Interrupt() as stop: ... if stop: save and leave`. A second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.name = ""
        self.before: dict[int, object] = {}

    def __bool__(self) -> bool:
        return bool(self.name)

    def wish(self, number: int, frame: object) -> None:
        self.name = signal.Signals(number).name
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():     # elsewhere (a notebook's worker) Python has no handlers
            self.before = {s: signal.signal(s, self.wish) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exc: object) -> None:
        for s, handler in self.before.items():
            signal.signal(s, handler)  # type: ignore[arg-type]
