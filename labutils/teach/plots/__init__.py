"""One function per picture, one palette: a `Picture` or an `Animation` that states a finding."""

from labutils.teach.plots.animations import (
    bucket_animation,
    key_ring,
    plan_animation,
    ring_animation,
    tile_walk,
)
from labutils.teach.plots.bars import (
    comm_bars,
    memory_bars,
    memory_map,
    tensor_shares,
    token_weights,
    traffic_bars,
    visits,
)
from labutils.teach.plots.formats import (
    bit_pattern,
    dynamic_range,
    exponent_histogram,
    number_line,
    relative_error,
    shared_grids,
)
from labutils.teach.plots.layouts import who_computes
from labutils.teach.plots.lines import (
    cost_curves,
    curves,
    gradient_noise,
    roofline,
    running_sums,
    trade_off,
)
from labutils.teach.plots.matrices import low_rank
from labutils.teach.plots.picture import Animation, Picture
from labutils.teach.plots.pipelines import gantt, schedule_animation
from labutils.teach.plots.timelines import memory_timeline, messages, overlap, plan_maps, who_holds
