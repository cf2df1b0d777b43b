"""What happens when: the bytes that are alive at each moment of a step."""

from collections.abc import Iterable
from dataclasses import dataclass

from labutils.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Moment:
    """The bytes that are alive right after an `event` of a `phase` ("forward", "backward", "optimizer", …)."""

    phase: str
    event: str
    ledger: Ledger


@dataclass(frozen=True)
class History:
    """Bytes resident over the course of a step: one ledger a moment."""

    moments: tuple[Moment, ...]

    def __init__(self, moments: Iterable[Moment]) -> None:
        object.__setattr__(self, "moments", tuple(moments))
        if not self.moments:
            raise ValueError("a History needs at least one Moment: nothing was recorded")

    @property
    def peak(self) -> Moment:
        """The first moment at which most bytes are alive."""
        return max(self.moments, key=lambda moment: moment.ledger.total)

    @property
    def phases(self) -> dict[str, Moment]:
        """The peak of each phase, in order of appearance."""
        peaks: dict[str, Moment] = {}
        for moment in self.moments:
            if moment.phase not in peaks or moment.ledger.total > peaks[moment.phase].ledger.total:
                peaks[moment.phase] = moment
        return peaks
