"""Pipeline schedules as data (GPipe, 1F1B, interleaved, breadth-first, zero-bubble, DualPipe): one
generator writes them, moves are checked and timed; published bubbles and peaks are formulas."""

from labutils.schedule.formulas import bubble, peak_in_flight
from labutils.schedule.generators import (
    breadth_first,
    dualpipe,
    dualpipe_v,
    eager_one_f_one_b,
    gpipe,
    interleaved,
    interleaved_zb,
    loop,
    naive,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
    spell,
    spell_line,
    vee,
    zb_auto,
    zb_h1,
    zb_h2,
    zb_v,
)
from labutils.schedule.orders import Board, Op, Schedule, read, why_illegal
from labutils.schedule.simulation import Durations, PipelineRun, simulate
from labutils.schedule.whole import whole_step
