"""Files that the user asked for, outside the store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from audit.errors import ConfigError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Make the folder of an output file, and name a file that cannot be written.

    Raises
    ------
    ConfigError
        In the place of any OSError of the block.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ConfigError(f"cannot write {path} ({error.strerror}); choose another place") from None
