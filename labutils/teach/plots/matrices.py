"""Matrices as boxes to scale: a weight, and beside it an update of low rank."""

from labutils import units
from labutils.teach.plots import draw, style
from labutils.teach.plots.picture import Picture


@style.drawn
def low_rank(d: int, k: int, r: int) -> Picture:
    """A frozen weight W[d, k], and B[d, r] and A[r, k], which are trained beside it, all to one
    scale. What is thinner than a line is drawn as a line."""
    d, k, r = (units.whole(size, name, 1) for size, name in ((d, "d"), (k, "k"), (r, "r")))
    share = r * (d + k) / (d * k)
    found = f"A and B have {share:.2%} of the numbers of W"
    height = 1.85
    _, axes = style.canvas(found, height=height, left=0.1, right=0.1, top=0.0, bottom=0.1)
    width, tall = style.inches(axes)
    inch = max(d, k) / 1.35  # numbers per inch
    frozen, trained = style.NEUTRAL[0], style.COMPONENT_COLORS["weights"]
    thin = max(r / inch, 0.02)
    at, boxes = (tall - d / inch) / 2, []
    boxes.append((0.9, at, k / inch, d / inch, frozen, f"W  [{d:,} × {k:,}]\nfrozen"))
    boxes.append((3.2, at, thin, d / inch, trained, f"B  [{d:,} × {r}]\nzero at first"))
    boxes.append((3.75, at + (d / inch - thin) / 2, k / inch, thin, trained, ""))
    for x, y, w, h, color, said in boxes:
        draw.box(axes, x, y, w, h, color)
        if said.startswith("W") and h > 0.5:
            axes.text(x + w / 2, y + h / 2, said, ha="center", va="center", color=style.on(color))
        elif said:
            axes.text(x + w / 2, y - 0.06, said, ha="center", va="top")
    below = at + (d / inch - thin) / 2 - 0.06
    axes.text(3.75 + k / inch / 2, below, f"A  [{r} × {k:,}]\ndrawn", ha="center", va="top")
    for x, said in (
        (0.45, "y  =  ("),
        (2.75, "+  α/r ·"),
        (3.5, "·"),
        (3.95 + k / inch, ")  ·  x"),
    ):
        axes.text(x, tall / 2, said, ha="center", va="center", weight="bold")
    axes.set(xlim=(0, width), ylim=(-0.2, tall))
    axes.axis("off")
    told = f"A frozen weight of {d:,} by {k:,} numbers; beside it, to scale, B of {d:,} by {r} and "
    return Picture(axes.figure, f"{told}A of {r} by {k:,}, which are trained: {share:.2%} of W.")
