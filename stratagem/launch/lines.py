"""Lines out of a stream of bytes: unfinished ones, progress bars and noise included."""

from __future__ import annotations

PATIENCE = 2.0  # seconds that an unfinished line or a progress bar waits to be shown as it stands
_LONGEST = 1 << 16  # bytes; a line beyond it is cut


class Lines:
    """Cuts a stream of bytes into lines; of a bar redrawn by carriage returns the last state."""

    def __init__(self) -> None:
        self._rest = b""
        self._since = 0.0
        self._continued = False

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """Return the lines that are complete by now."""
        self._since = self._since if self._rest else now
        *whole, self._rest = (self._rest + data).split(b"\n")
        lines = [line for raw in whole for line in self._finish(raw)]
        return lines + (self.flush() if len(self._rest) > _LONGEST else [])

    def stale(self, now: float) -> list[bytes]:
        """Return what has waited too long for the end of its line."""
        return self.flush() if self._rest and now - self._since >= PATIENCE else []

    def flush(self) -> list[bytes]:
        """Return the unfinished line as it stands; what follows begins a new one."""
        state, self._rest = _state(self._rest), b""
        self._continued = self._continued or bool(state)
        return [state] if state else []

    def _finish(self, raw: bytes) -> list[bytes]:
        state, continued = _state(raw), self._continued
        self._continued = False
        return [state] if state or not continued else []


def _state(raw: bytes) -> bytes:
    """What a terminal would show after these bytes, roughly: the text since the last return."""
    return next((text for text in reversed(raw.split(b"\r")) if text.strip()), b"")
