"""`labkit peers`: a thin layer over `labkit.harness.compare.peers`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from labkit.cli.words import Command
from labkit.system.progress import progress_bar
from labkit.system.terminal import terminal

out = terminal()
err = terminal(stderr=True)

peers = typer.Typer(add_completion=False, help="List or install other runtimes to compare with.")


@peers.callback(invoke_without_command=True)
def bare(call: typer.Context) -> None:
    if call.invoked_subcommand is None:
        list_peers()


@peers.command("list")
def list_peers() -> None:
    """List the peers: version, sides, folder, and why a peer cannot be used."""
    from labkit.harness.compare.peers.folder import installed
    from labkit.harness.compare.peers.table import PEERS

    columns = (Column(name, no_wrap=True) for name in ("peer", "version"))
    table = Table(*columns, "sides", Column("folder, or what is missing", overflow="fold"))
    for name, peer in PEERS.items():
        present, missing, packages = installed(name), peer.unavailable(), peer.packages()
        version, folder = "", packages
        if present is not None and packages == present.packages:  # else an interpreter of the user has the packages
            version, folder = present.version, present.path
        where = escape(missing or str(folder))
        table.add_row(name, version, ", ".join(peer.sides), where, style="dim" if missing else None)
    out.print(table)


@peers.command("install", cls=Command)
def install_peer(
    name: Annotated[str, typer.Argument(help="A name from `labkit peers list`.")],
    again: Annotated[bool, typer.Option("--again", help="Install it again even if it is installed.")] = False,
) -> None:
    """Download a peer, or compile it for this machine, into a folder of its own."""
    from labkit.harness.compare.peers.folder import installed
    from labkit.harness.compare.peers.install import install
    from labkit.harness.compare.peers.table import peer_named

    peer, last_label = peer_named(name), ""
    before = installed(name)
    with progress_bar(err) as bar:

        def follow(done: float, total: float, label: str) -> None:
            nonlocal last_label
            if label != last_label:
                err.print(escape(label), highlight=False, soft_wrap=True)
                last_label = label
            bar(done, total, label)

        present = install(peer, again=again, progress=follow)
    already = " already; --again installs it anew" if present == before and not again else ""
    out.print(f"{name} {present.version} is installed{already}: {present.path}", soft_wrap=True, markup=False)
    if missing := peer.unavailable():
        err.print(f"note: {escape(missing)}", style="yellow", highlight=False, soft_wrap=True)
    out.print(f"labkit compare MODEL --baseline {' or '.join(peer.sides)}", soft_wrap=True, markup=False)
