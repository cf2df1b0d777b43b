"""One function per picture, one palette. Each returns a `Picture` or an `Animation` whose title states the finding."""

from labutils.teach.plots.attention import roofline, tile_walk, traffic_bars
from labutils.teach.plots.communication import comm_bars, cost_curves, messages, ring_animation
from labutils.teach.plots.curves import curves
from labutils.teach.plots.data_parallel import bucket_animation, overlap
from labutils.teach.plots.formats import bits, dynamic_range, number_line, relative_error
from labutils.teach.plots.memory import memory_bars, memory_timeline
from labutils.teach.plots.memory_map import memory_map
from labutils.teach.plots.picture import Animation, Picture
from labutils.teach.plots.precision import exponent_histogram
from labutils.teach.plots.recomputation import plan_animation, plan_maps, token_weights, trade_off
from labutils.teach.plots.sums import running_sums
from labutils.teach.plots.training import gradient_noise
from labutils.teach.plots.zero import who_holds

__all__ = [
    "Animation",
    "Picture",
    "bits",
    "bucket_animation",
    "comm_bars",
    "cost_curves",
    "curves",
    "dynamic_range",
    "exponent_histogram",
    "gradient_noise",
    "memory_bars",
    "memory_map",
    "memory_timeline",
    "messages",
    "number_line",
    "overlap",
    "plan_animation",
    "plan_maps",
    "relative_error",
    "ring_animation",
    "roofline",
    "running_sums",
    "tile_walk",
    "token_weights",
    "trade_off",
    "traffic_bars",
    "who_holds",
]
