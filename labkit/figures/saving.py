"""Figures as files: pictures for papers and slides, and pages that open without a network."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from plotly.basedatatypes import BaseFigure

from labkit.figures.page import figure_page
from labkit.system.errors import RunError, UserError, UserTypeError
from labkit.system.home import expanded
from labkit.system.lifetime import kill_session
from labkit.system.whole_file import whole_file, write_whole

PAGE = ".html"
PICTURES = (".png", ".svg", ".pdf")
WIDTH = 1200  # pixels, for which the lines of a subtitle are broken
SCALE = 2.0
SECONDS = 60.0  # the time limit for a browser to start and to draw
OTHERWISE = f"or save it as {PAGE}, which needs nothing"


def save(
    figure: BaseFigure,
    path: str | os.PathLike[str],
    *,
    width: int = WIDTH,
    height: int | None = None,
    scale: float = SCALE,
) -> Path:
    """Writes a figure as a picture (.png, .svg, .pdf) or as a page (.html), whole or not at all; returns its path.

    A page contains all of plotly.js and opens without a network. A picture is drawn by kaleido in a Chromium or Chrome
    without a window, which loads nothing from a network; it takes two or three seconds. width, height: in pixels; None:
    the figure's own height. scale: pixels of a .png for each pixel of width and height.

    UserError: an unknown ending, a size of 0 or less, no kaleido, no browser. UserTypeError: not a figure. RunError:
    the browser failed.
    """
    target = expanded(path)
    ending = target.suffix.lower()
    if not isinstance(figure, BaseFigure):
        raise UserTypeError(
            f"got a {type(figure).__name__} to save as {target}, expected a figure of plotly's, such as "
            "labkit.figures.per_token_figure(comparison)"
        )
    if ending not in (PAGE, *PICTURES):
        raise UserError(f"got {target}, expected a name that ends in {', '.join(PICTURES)} or {PAGE}")
    for name, size in (("width", width), ("height", height), ("scale", scale)):
        if size is not None and not size > 0:
            raise UserError(f"got {name} = {size}, expected a number above 0")
    if ending == PAGE:
        write_whole(target, figure_page(figure))
        return target
    options = {"format": ending[1:], "width": width, "height": height or figure.layout.height, "scale": scale}
    with ThreadPoolExecutor(1) as executor:  # a notebook's own thread has an event loop that runs already
        picture = executor.submit(asyncio.run, _drawn(figure, target, options)).result()
    with whole_file(target) as partial:
        partial.write_bytes(picture)
    return target


async def _drawn(figure: BaseFigure, target: Path, options: dict[str, Any]) -> bytes:
    """Draws a picture and returns its bytes. The browser is closed in every case."""
    try:
        from kaleido import Kaleido
        from kaleido.errors import ChromeNotFoundError, KaleidoError
    except ImportError:
        raise UserError(
            f"got {target}, but kaleido, which draws pictures, is not installed; pip install 'labkit[pictures]', "
            f"{OTHERWISE}"
        ) from None
    try:
        browser = Kaleido(mathjax=False, timeout=SECONDS)  # MathJax would be loaded from a network
    except ChromeNotFoundError:
        browser_path = os.environ.get("BROWSER_PATH")
        search = f"none at BROWSER_PATH={browser_path}" if browser_path else "none of its names is in PATH"
        raise UserError(
            f"got {target}, but a picture is drawn by Chromium or Chrome, and there is {search}; sudo apt install "
            f"chromium, or name one in BROWSER_PATH, {OTHERWISE}"
        ) from None
    try:
        async with asyncio.timeout(SECONDS) as limit:
            await browser.open()
            return await browser.calc_fig(figure.to_dict(), opts=options)
    except (KaleidoError, RuntimeError, TimeoutError) as error:
        if hasattr(browser, "subprocess"):
            kill_session(browser.subprocess)  # it may never answer again
        failure = (
            f"failed: {error.args[0]}" if error.args and not limit.expired() else f"was not done after {SECONDS:g} s."
        )
        raise RunError(
            f"{target} was not written: the browser that draws it {failure} Try another one, named in BROWSER_PATH, "
            f"{OTHERWISE}"
        ) from error
    finally:
        await browser.close()
