"""What a notebook cell tells whoever runs the notebook: how far it is, and what came out of it."""

from typing import Any

MIME_TYPE = "application/vnd.labkit.progress+json"
HEADLINE_MIME_TYPE = "application/vnd.labkit.headline"


def as_output(done: float, total: float, label: str) -> dict[str, Any]:
    """A display output, by MIME type: the state for a program, one line of text for everybody else."""
    return {MIME_TYPE: {"done": done, "total": total, "label": label}, "text/plain": label}
