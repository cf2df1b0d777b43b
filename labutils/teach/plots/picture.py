"""What a figure function returns: a still `Picture`, or an `Animation` that needs no kernel."""

import base64
import html
import io
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from urllib.parse import quote

import matplotlib
from matplotlib.figure import Figure, SubFigure
from matplotlib.text import Text
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from labutils.teach.plots import style

# A white card in light and dark themes alike: the palette is chosen against white.
CARD = (
    "display:inline-block;max-width:100%;box-sizing:border-box;margin:0.5em 0;padding:8px;"
    "border-radius:6px;background:#fff;color:#1b1b1b;overflow-x:auto"
)
_HERE = Path(__file__).parent


class Picture:
    """A figure and the text that says the same to whoever cannot see it."""

    def __init__(self, figure: Figure | SubFigure, alt: str) -> None:
        if not isinstance(figure, Figure):
            raise TypeError(f"a Picture holds a matplotlib Figure, got {type(figure).__name__}")
        self.figure = figure
        self.alt = _described(alt)

    @cached_property
    def png(self) -> bytes:
        """The figure as a PNG at twice the resolution of the page, the same bytes every time."""
        sheet = io.BytesIO()
        with matplotlib.rc_context(style.RC):
            self.figure.savefig(sheet, format="rgba", dpi=192)
        width, height = (int(inches * 192) for inches in self.figure.get_size_inches())
        image = Image.frombytes("RGBA", (width, height), sheet.getvalue()).convert("RGB")
        # Flat fills and gray text need few colors: a palette cuts the file to a third.
        packed = io.BytesIO()
        image = image.quantize(128, dither=Image.Dither.NONE)
        image.save(packed, format="png", optimize=True, pnginfo=self._written)
        return packed.getvalue()

    @property
    def _written(self) -> PngInfo:
        """Every text of the figure, kept with the pixels: tests compare words, not shades."""
        texts = [text.get_text() for text in self.figure.findobj(Text) if text.get_visible()]
        info = PngInfo()
        info.add_itxt("words", "|".join(filter(None, texts)), zip=True)
        return info

    @cached_property
    def svg(self) -> str:
        """The figure as SVG, the same text every time."""
        sheet = io.StringIO()
        with matplotlib.rc_context(style.RC):
            self.figure.savefig(
                sheet,
                format="svg",
                metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
            )
        return sheet.getvalue()

    def html(self, *, vector: bool = False) -> str:
        """The figure on a white card: a PNG, or an SVG, which states of a panel share better."""
        data = (
            "svg+xml," + quote(self.svg, safe=" ;:=/'(),.-")
            if vector
            else "png;base64," + base64.b64encode(self.png).decode()
        )
        width = round(self.figure.get_size_inches()[0] * 96)
        return (
            f'<figure style="{CARD}"><img alt="{html.escape(self.alt)}" width="{width}" '
            f'style="{style.legible(width)}" src="data:image/{data}"></figure>'
        )

    def _repr_html_(self) -> str:
        return self.html()

    def __repr__(self) -> str:
        return self.alt


class Animation:
    """Inline SVG frames with labels, to play, step through or drag; `alt` tells the whole story.

    What stands in `svg.glide` arrives from its offset when the frame appears.
    """

    def __init__(self, frames: Sequence[str], labels: Sequence[str], alt: str) -> None:
        if not frames:
            raise ValueError("an Animation needs at least one frame")
        if len(frames) != len(labels):
            raise ValueError(
                f"each frame needs its label: got {len(frames)} frames and {len(labels)} labels"
            )
        self.frames = tuple(frames)
        self.labels = tuple(labels)
        self.alt = _described(alt)

    def _repr_html_(self) -> str:
        shots = "".join(
            f'<div class="lu-frame"{" hidden" * (i > 0)}>{frame}<p>{html.escape(label)}</p></div>\n'
            for i, (frame, label) in enumerate(zip(self.frames, self.labels, strict=True))
        )
        return (
            f'<div class="lu-player" role="group" aria-label="{html.escape(self.alt)}" '
            f'data-lm-suppress-shortcuts="true" style="{CARD}">\n'
            f"{shots}<style>{(_HERE / 'player.css').read_text('utf-8')}</style>"
            f"<script>{(_HERE / 'player.js').read_text('utf-8')}</script></div>"
        )

    def __repr__(self) -> str:
        return self.alt


def _described(alt: str) -> str:
    if not isinstance(alt, str) or not alt.strip():
        raise ValueError(f"a figure needs alt text that says what it shows, got {alt!r}")
    return " ".join(alt.split())
