"""A thread that writes all the texts asked of it side by side: they join and leave while others are being written."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from engine.generate import Batch, Drawn, Options
from engine.log import say

Sink = Callable[[Drawn | Exception], object]


class Refused(Exception):
    """A request that is not served: a status and one line."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status = status


class Worker(threading.Thread):
    """A batch of all that was submitted. A sink gets what is drawn, or what ended it, after which `make` makes a new batch."""

    def __init__(self, make: Callable[[], Batch], waiting: int):
        super().__init__(daemon=True)
        self.make, self.batch = make, make()
        self.most = self.batch.width + waiting
        self.sinks: dict[int, Sink] = {}
        self.todo: deque[Callable[[], None]] = deque()
        self.wake, self.closing, self.busy, self.next_key = threading.Condition(), False, False, 0

    def submit(self, prompts: list[list[int]], options: Options, seeds: list[int], sink: Sink) -> list[int]:
        with self.wake:
            if self.closing:
                raise Refused(503, "the server is shutting down")
            if len(prompts) > self.most:
                raise Refused(400, f"{len(prompts)} texts in one request: at most {self.most} may be written or wait")
            if len(self.sinks) + len(prompts) > self.most:
                raise Refused(429, f"{len(self.sinks)} texts are being written or wait, at most {self.most} may: try again later")
            keys = list(range(self.next_key, self.next_key + len(prompts)))
            self.next_key += len(prompts)
            for key, prompt, seed in zip(keys, prompts, seeds):
                self.sinks[key] = sink
                self.todo.append(lambda key=key, prompt=prompt, seed=seed: self.batch.add(key, prompt, options, seed))  # type: ignore[misc]
            self.wake.notify()
        return keys

    def cancel(self, keys: list[int]) -> None:
        with self.wake:
            for key in keys:
                if self.sinks.pop(key, None):
                    self.todo.append(lambda key=key: self.batch.drop(key))  # type: ignore[misc]
            self.wake.notify()

    def close(self) -> None:
        with self.wake:
            self.closing = True
            self.wake.notify()
        self.join()

    def run(self) -> None:
        while True:
            with self.wake:
                self.wake.wait_for(lambda: self.todo or self.closing or self.busy)
                todo, self.todo = self.todo, deque()
            if self.closing:
                return self.fail(Refused(503, "the server is shutting down"))
            try:
                for do in todo:
                    do()
                drawn = self.batch.step()
            except Exception as e:      # for example no memory: these requests fail, later ones are served
                say(f"serve: {type(e).__name__}: {e}")
                self.batch = self.make()
                self.fail(Refused(500, f"{type(e).__name__}: {e}"))
                drawn = []
            self.busy = bool(drawn)
            for d in drawn:
                with self.wake:
                    sink = self.sinks.pop(d.key, None) if d.last else self.sinks.get(d.key)
                if sink:
                    sink(d)

    def fail(self, e: Exception) -> None:
        with self.wake:
            sinks, self.sinks = self.sinks, {}
        for sink in sinks.values():
            sink(e)
