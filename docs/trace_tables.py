"""The tables of `labkit trace`, from their catalogue."""

from __future__ import annotations

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from labkit.nsys.tables.catalogue import COMMANDS


class TraceTables(SphinxDirective):
    """`trace-tables`: a row for each command, and below them the columns of each table."""

    def run(self) -> list[nodes.Node]:
        commands = [
            f"| `labkit trace {name}` | {command.help} | {command.needs} |" for name, command in COMMANDS.items()
        ]
        tables = {table.name: table for command in COMMANDS.values() for table in command.tables}
        columns = [f"| `{name}` | {', '.join(f'`{column}`' for column in tables[name].columns)} |" for name in tables]
        lines = ["| command | shows | needs |", "|---|---|---|", *commands, ""]
        lines += ["| table | columns; a name ends with its unit |", "|---|---|", *columns]
        return self.parse_text_to_nodes("\n".join(lines))
