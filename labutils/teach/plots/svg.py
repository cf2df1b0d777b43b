"""The elements of an animation's frame, as SVG text."""

import html
from collections.abc import Iterable

from labutils.teach.plots import style

FONT = "DejaVu Sans, Verdana, sans-serif"


def element(name: str, content: str = "", /, **attributes: object) -> str:
    """An element; numbers are rounded to a tenth of a pixel, and `stroke_width` is stroke-width.

    >>> element("rect", x=1 / 3, width=20, stroke_width=0.75)
    '<rect x="0.3" width="20" stroke-width="0.8"/>'
    """
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_short(value)}"'
        for key, value in attributes.items()
    )
    return f"<{name}{said}>{content}</{name}>" if content else f"<{name}{said}/>"


def _short(value: object) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


def rect(
    x: float,
    y: float,
    width: float,
    height: float,
    fill: str,
    stroke: str = style.INK,
    stroke_width: float = 1,
) -> str:
    """A rectangle, (x, y) at its upper left; an empty `stroke` leaves it without an edge."""
    edge = {"stroke": stroke, "stroke_width": stroke_width} if stroke else {}
    return element("rect", x=x, y=y, width=width, height=height, fill=fill, **edge)


def words(x: float, y: float, said: str, anchor: str = "middle", **attributes: object) -> str:
    """A line of text on the baseline `y`, with its "start", "middle" or "end" at `x`."""
    return element("text", html.escape(said), x=x, y=y, text_anchor=anchor, **attributes)


def path(moves: str, **attributes: object) -> str:
    """A path, filled or stroked as its attributes say."""
    return element("path", d=moves, **attributes)


def line(x1: float, y1: float, x2: float, y2: float, width: float = 1.5) -> str:
    """A gray line."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=style.NEUTRAL[0], stroke_width=width)


def glide(content: str, x: float, y: float) -> str:
    """What arrives from (x, y) pixels away when its frame appears."""
    return element("g", content, class_="lu-glide", style=f"--x:{x:.1f}px;--y:{y:.1f}px")


def frame(parts: Iterable[str], width: float, height: float, said: str) -> str:
    """The parts as one image; `said` tells whoever cannot see it what it shows."""
    return element(
        "svg",
        "".join(parts),
        xmlns="http://www.w3.org/2000/svg",
        role="img",
        aria_label=html.escape(said),
        width=round(width),
        height=round(height),
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        font_family=FONT,
        font_size=13,
        style=style.legible(width),
    )
