"""Keeps unclosed elements in a notebook's HTML from swallowing the rest of the page."""

import re

# Comments, and elements whose content is raw text. Without an end tag they reach to the end of the page.
OPENING = re.compile(
    r"<!--|<(script|style|textarea|title|xmp|iframe|noembed|noframes|noscript|plaintext)\b[^>]*>", re.IGNORECASE
)


def contained(html: str) -> str:
    """`html` with the openings of unclosed comments and raw-text elements turned into text."""
    parts, position = [], 0
    while opening := OPENING.search(html, position):
        parts.append(html[position : opening.start()])
        name = opening[1]
        end = re.compile(rf"</{name}\s*>" if name else "-->", re.IGNORECASE).search(html, opening.end())
        if end is None:
            parts.append(f"&lt;{opening[0][1:]}")
            position = opening.end()
            continue
        inside = html[opening.end() : end.start()]
        if (name or "").lower() == "script" and "<!--" in inside:
            # After "<!--" a browser also counts script tags inside the script's text.
            inside = re.sub(r"<(?=script)", r"\\x3c", inside, flags=re.IGNORECASE)
        parts += [opening[0], inside, end[0]]
        position = end.end()
    return "".join([*parts, html[position:]])
