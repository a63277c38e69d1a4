"""The doctor's findings as a table of a page. It wraps, and scrolls on a page that is too narrow."""

from __future__ import annotations

import html
from collections.abc import Iterable

from IPython.display import HTML

from labkit.nsys.doctor.check import DoctorCheck, Status

COLORS = {Status.OK: "#1f8a54", Status.WARN: "#b07a00", Status.FAIL: "#d0453a"}  # readable on paper and in the dark
CELL = "text-align:left;vertical-align:top"


def checks_table(checks: Iterable[DoctorCheck]) -> HTML:
    """One row per check, with the repair under its finding."""
    head = "".join(f'<th style="{CELL}">{name}</th>' for name in ("status", "check", "finding"))
    rows = "".join(f"<tr>{_row(check)}</tr>" for check in checks)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return HTML(f'<div style="overflow-x:auto">{table}</div>')


def _row(check: DoctorCheck) -> str:
    finding = html.escape(check.finding)
    if check.repair:
        finding += f"<br><b>repair:</b> <code>{html.escape(check.repair)}</code>"
    status = f'<b style="color:{COLORS[check.status]}">{check.status}</b>'
    cells = (
        status,
        html.escape(check.name),
        f'<div style="min-width:min(16em,40vw);overflow-wrap:anywhere">{finding}</div>',
    )
    return "".join(f'<td style="{CELL}">{cell}</td>' for cell in cells)
