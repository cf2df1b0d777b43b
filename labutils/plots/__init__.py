"""One function per picture, one palette. Each returns a `Picture` or an `Animation` whose title states the finding."""

from labutils.plots.attention import roofline, tile_walk, traffic_bars
from labutils.plots.communication import comm_bars, cost_curves, messages, ring_animation
from labutils.plots.curves import curves
from labutils.plots.data_parallel import bucket_animation, overlap
from labutils.plots.formats import bits, dynamic_range, number_line, relative_error
from labutils.plots.memory import memory_bars, memory_timeline
from labutils.plots.memory_map import memory_map
from labutils.plots.picture import Animation, Picture
from labutils.plots.precision import exponent_histogram
from labutils.plots.recomputation import plan_animation, plan_maps, token_weights, trade_off
from labutils.plots.sums import running_sums
from labutils.plots.training import gradient_noise
from labutils.plots.zero import who_holds

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
