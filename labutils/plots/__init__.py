"""One function per picture, one palette. Every function returns a `Picture` (or an `Animation`) whose title states the finding."""

from labutils.plots.picture import Animation, Picture

__all__ = ["Animation", "Picture"]
