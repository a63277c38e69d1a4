"""`python -P -m labkit.notebooks.lab_server …`: JupyterLab that says its address, and what goes wrong, and no more."""

from __future__ import annotations

import logging
import signal
import sys

from labkit.system.interrupts import INTERRUPTED

ADDRESSES = ("To access the server", "is running at", "listening on")  # begin what Jupyter says of its address


def main() -> None:
    """Starts the server of this process and stays until it ends."""
    try:
        from jupyterlab.labapp import LabApp

        server = LabApp.initialize_server(argv=sys.argv[1:])
    except KeyboardInterrupt:  # that takes seconds
        sys.exit(INTERRUPTED)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Jupyter found no terminal, and would leave its kernels to themselves and its files in their place.
        signal.signal(signal.SIGINT, signal.getsignal(signal.SIGTERM))
    server.log.addFilter(_says_no_address)
    server.io_loop.add_callback(_say_address, server.display_url.split()[0])  # once the server listens there
    server.start()


def _say_address(address: str) -> None:
    sys.stdout.write(f"lab: {address}\n")
    sys.stdout.flush()


def _says_no_address(record: logging.LogRecord) -> bool:
    return not any(words in record.getMessage() for words in ADDRESSES)


if __name__ == "__main__":
    main()
