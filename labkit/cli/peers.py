"""`labkit peers`: a thin layer over `labkit.harness.compare.peers`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from labkit.system.progress import progress_bar
from labkit.system.terminal import terminal

out = terminal()
err = terminal(stderr=True)

peers = typer.Typer(help="Other runtimes to measure against: list them, install one.")


@peers.callback(invoke_without_command=True)
def bare(call: typer.Context) -> None:
    if call.invoked_subcommand is None:
        list_peers()


@peers.command("list")
def list_peers() -> None:
    """Say which peers are installed, where, which sides each gives, and why one cannot be used."""
    from labkit.harness.compare.peers.folder import installed
    from labkit.harness.compare.peers.table import PEERS

    columns = (Column(name, no_wrap=True) for name in ("peer", "version"))
    table = Table(*columns, "sides", Column("folder, or what is missing", overflow="fold"))
    for name, peer in PEERS.items():
        found, missing, packages = installed(name), peer.unavailable(), peer.packages()
        where = missing or str(packages if found is None or packages != found.packages else found.path)
        version = found.version if found is not None and packages == found.packages else ""
        table.add_row(name, version, ", ".join(peer.sides), escape(where), style="dim" if missing else None)
    out.print(table)


@peers.command("install")
def install_peer(
    name: Annotated[str, typer.Argument(help="As `labkit peers list` has it.")],
    again: Annotated[bool, typer.Option("--again", help="Install it anew where it is installed already.")] = False,
) -> None:
    """Download a peer, or compile it for this machine, into a folder of its own."""
    from labkit.harness.compare.peers.folder import installed
    from labkit.harness.compare.peers.install import install
    from labkit.harness.compare.peers.table import peer_named

    peer, said = peer_named(name), ""
    before = installed(name)
    with progress_bar(err) as bar:

        def follow(done: float, total: float, label: str) -> None:
            nonlocal said
            if label != said:
                err.print(escape(label), highlight=False, soft_wrap=True)
                said = label
            bar(done, total, label)

        found = install(peer, again=again, progress=follow)
    already = " already; --again installs it anew" if found == before and not again else ""
    out.print(f"{name} {found.version} is installed{already}: {found.path}", soft_wrap=True, markup=False)
    if missing := peer.unavailable():
        err.print(f"note: {escape(missing)}", style="yellow", highlight=False, soft_wrap=True)
    out.print(f"labkit compare MODEL --baseline {' or '.join(peer.sides)}", soft_wrap=True, markup=False)
