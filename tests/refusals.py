"""What a checkpoint that cannot be used is refused with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from audit.errors import CheckpointError, ExitCode


def message(call: Callable[..., Any], *arguments: Any, **keywords: Any) -> str:
    """Return the one line with which `call` refuses a checkpoint."""
    with pytest.raises(CheckpointError) as caught:
        call(*arguments, **keywords)
    assert caught.value.exit_code == ExitCode.CHECKPOINT
    text = str(caught.value)
    assert "\n" not in text
    return text
