"""Run Prefect's API on a free loopback port until standard input ends; started by flows/server.py.

The parent holds the other end of the pipe, so that the server ends with the parent, however that ends.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time

GRACE_SECONDS = 5


def main() -> None:
    """Print the port, then serve."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nobody reads the pipe after the first line

    import uvicorn

    config = uvicorn.Config(
        "prefect.server.api.server:create_app",
        factory=True,
        log_level="error",
        lifespan="on",
        timeout_graceful_shutdown=GRACE_SECONDS // 2,
    )
    uvicorn.Server(config).run(sockets=[listener])


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os._exit(0)


if __name__ == "__main__":
    main()
