"""`python -P -m labkit.notebooks.lab_server …`: JupyterLab that prints only its address and its errors."""

from __future__ import annotations

import logging
import signal
import sys

from labkit.system.interrupts import INTERRUPTED

ADDRESSES = ("To access the server", "is running at", "listening on")  # in Jupyter's own messages about its address


def main() -> None:
    """Starts the server in this process and returns when it ends."""
    try:
        from jupyterlab.labapp import LabApp

        server = LabApp.initialize_server(argv=sys.argv[1:])
    except KeyboardInterrupt:  # the lines above take seconds
        sys.exit(INTERRUPTED)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Jupyter found no terminal, and would leave its kernels running and its files in place.
        signal.signal(signal.SIGINT, signal.getsignal(signal.SIGTERM))
    server.log.addFilter(_has_no_address)
    server.io_loop.add_callback(_say_address, server.display_url.split()[0])  # once the server listens there
    server.start()


def _say_address(address: str) -> None:
    sys.stdout.write(f"lab: {address}\n")
    sys.stdout.flush()


def _has_no_address(record: logging.LogRecord) -> bool:
    return not any(words in record.getMessage() for words in ADDRESSES)


if __name__ == "__main__":
    main()
