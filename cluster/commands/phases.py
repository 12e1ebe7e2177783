"""How commands show what takes them long."""

import time

import click


class Phases:
    """One line on stderr for each phase, with the seconds it took."""

    def __init__(self) -> None:
        self.began_s = time.monotonic()
        self._phase_s = self.began_s
        self._open = False

    def begin(self, name: str, ago_s: float = 0.0) -> None:
        """Starts a phase that began `ago_s` seconds ago, and ends the one before then."""
        self.end(ago_s)
        click.echo(f"{name[:60]:.<60}", err=True, nl=False)
        self._open, self._phase_s = True, time.monotonic() - ago_s

    def end(self, ago_s: float = 0.0) -> None:
        if self._open:
            seconds = max(0.0, time.monotonic() - ago_s - self._phase_s)
            click.echo(f" {seconds:5.1f} s", err=True)
        self._open = False
