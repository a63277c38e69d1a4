"""HTML of a notebook that cannot swallow what follows it on the page."""

import re

# Elements whose contents are text until their end, and comments: without an end they last until the end of the page.
OPENING = re.compile(
    r"<!--|<(script|style|textarea|title|xmp|iframe|noembed|noframes|noscript|plaintext)\b[^>]*>", re.IGNORECASE
)


def contained(html: str) -> str:
    """`html`, in which the beginnings of comments and of such elements that have no end become text."""
    parts, at = [], 0
    while opening := OPENING.search(html, at):
        parts.append(html[at : opening.start()])
        name = opening[1]
        end = re.compile(rf"</{name}\s*>" if name else "-->", re.IGNORECASE).search(html, opening.end())
        if end is None:
            parts.append(f"&lt;{opening[0][1:]}")
            at = opening.end()
            continue
        inside = html[opening.end() : end.start()]
        if (name or "").lower() == "script" and "<!--" in inside:
            # After "<!--" a browser counts the script elements that a script's text seems to open.
            inside = re.sub(r"<(?=script)", r"\\x3c", inside, flags=re.IGNORECASE)
        parts += [opening[0], inside, end[0]]
        at = end.end()
    return "".join([*parts, html[at:]])
