"""Tells that something in a folder may have changed, by the notifications of the kernel."""

from __future__ import annotations

import importlib.util
import threading
from time import monotonic as now_s
from typing import TYPE_CHECKING

from tiergate.errors import ConfigError, install_hint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["Watcher", "now_s", "require"]

_DEBOUNCE_MS = 200
_STEP_MS = 50
_TIMEOUT_MS = 60_000


def require() -> None:
    """
    Raises:
        ConfigError: the package that knows the notifications is not installed.
    """
    if importlib.util.find_spec("watchfiles") is None:
        raise ConfigError(f"watchfiles is not installed: {install_hint('sync')}")


class Watcher:
    """Calls `notify` after changes, in a thread of its own, until `over` is set. It tells that there were some, not
    which: what is true is seen by a look, so nothing hangs on a queue that ran over. `is_watching` is False where
    there are no notifications; `complain` is told why."""

    def __init__(
        self, path: Path, over: threading.Event, notify: Callable[[], None], complain: Callable[[str], None]
    ) -> None:
        self.is_watching = True
        self._path = path
        self._over = over
        self._notify = notify
        self._complain = complain

    def start(self) -> None:
        """Begin to watch."""
        threading.Thread(target=self._run, name="tiergate-sync-watch", daemon=True).start()

    def _run(self) -> None:
        from watchfiles import watch

        try:
            for _ in watch(
                self._path,
                watch_filter=None,
                debounce=_DEBOUNCE_MS,
                step=_STEP_MS,
                rust_timeout=_TIMEOUT_MS,
                stop_event=self._over,
                raise_interrupt=False,
                ignore_permission_denied=False,  # else watchfiles passes over a limit that is reached, too
            ):
                self._notify()
        except Exception as error:  # whatever it is: the folder is still looked at
            self.is_watching = False
            self._complain(f"{self._path} is looked at every second, since its changes are not told: {error}")
            self._notify()
