"""Stored outputs are compared as numbers: what may differ on another machine, and what may not."""

import types

import nbval.plugin
import pytest
from nbformat.v4 import new_output
from printed import Printed, difference

SAME = {
    "one unit of the last digit": ("loss 4.203", "loss 4.202"),
    "either way": ("loss 4.203", "loss 4.204"),
    "a carry": ("9.99", "10.00"),
    "a carry where significant digits are printed": ("9.99", "10.0"),
    "a carry from a whole number": ("999", "1.00e+03"),
    "a finer unit below a power of ten": ("1.00e-07", "9.99e-08"),
    "zeros that :g leaves out": ("0.2", "0.200001"),
    "a whole number that :g prints": ("1", "0.99999"),
    "an exponent": ("1.234e+04", "1.235e+04"),
    "thousands": ("1,234.5 ms", "1,234.4 ms"),
    "a unit that is attached": ("1.23GB", "1.22GB"),
    "the sign of zero": ("-0.00", "0.00"),
    "a sign lost in rounding": ("-0.01", "0.00"),
    "a minus sign": ("−1.25 and -1.25", "−1.26 and -1.24"),
    "several": ("a 1.5, b 2.5 (3.5 %)", "a 1.4, b 2.6 (3.6 %)"),
    "a column to the right": ("loss    9.99 |\nrate    1.00 |", "loss   10.00 |\nrate    1.00 |"),
    "columns that grow": ("| a |  9.99 |\n| b |  1.00 |", "| a | 10.00 |\n| b |   1.00 |"),
    "HTML": ('<td style="width:9.9%">0.5</td>', '<td style="width:10.0%">0.6</td>'),
}
OTHER = {
    "two units": ("loss 4.203", "loss 4.205"),
    "two units of the finer of two": ("1.00e-07", "9.97e-08"),
    "another integer": ("29503 numbers", "29504 numbers"),
    "another integer with a comma": ("29,503 numbers", "29,504 numbers"),
    "another percentage without a digit": ("84 %", "83 %"),
    "another word": ("False 1.25", "True 1.25"),
    "one number more": ("1.25 1.25", "1.25 1.25 1.25"),
    "one number fewer": ("1.25 1.25", "1.25"),
    "nothing": ("1.25", ""),
    "a sign": ("0.5", "-0.5"),
    "a minus sign": ("−0.5", "0.5"),
    "another exponent": ("1.2e-05", "1.2e-06"),
    "another unit": ("1.23 GB", "1.23 MB"),
    "another number of digits": ("0.20", "0.2"),
    "a count that becomes a float": ("2 ranks", "2.0 ranks"),
    "digits that are meant": ("0.1000000015", "0.1000000016"),
    "seven digits": ("1604.061", "1604.062"),
    "a version": ("torch 2.13.0", "torch 2.13.1"),
    "a shorter version": ("torch 2.13.0", "torch 2.12.0"),
    "a format": ("fp8", "fp16"),
    "a bit pattern": ("0x1.8p+0", "0x1.9p+0"),
    "a bit": ("0 01111 0000000000", "0 01111 0000000001"),
    "nan": ("1.25", "nan"),
    "a blank more": ("loss 4.203", "loss  4.203"),
    "a line more": ("9.99\n", "10.00\n\n."),
}


@pytest.mark.parametrize("stored, now", SAME.values(), ids=SAME.keys())
def test_what_rounding_moves_is_the_same_text(stored, now):
    assert difference(stored, now) == "" == difference(now, stored)
    assert Printed(stored) == now and not Printed(stored) != now


@pytest.mark.parametrize("stored, now", OTHER.values(), ids=OTHER.keys())
def test_anything_else_is_another_text(stored, now):
    assert difference(stored, now) and difference(now, stored)
    assert Printed(stored) != now and not Printed(stored) == now


def test_a_difference_shows_its_place():
    told = difference("steps 10, loss 4.203, rate 1.5", "steps 10, loss 4.209, rate 1.6")
    assert told == "…steps 10, loss 4.203… is …steps 10, loss 4.209…"


def _compared(stored, now):
    """Whether nbval, as conftest.py extends it, takes `now` for the stored outputs."""
    parent = types.SimpleNamespace(sanitize_patterns={" at 0x[0-9a-f]+": " at ADDRESS"})
    parent.skip_compare = ("output_type", "name", "metadata", "execution_count")
    cell = types.SimpleNamespace(parent=parent, colors=nbval.plugin.nocolors)
    cell.format_output_compare = lambda *of: None
    cell.sanitize = lambda text: nbval.plugin.IPyNbCell.sanitize(cell, text)
    return nbval.plugin.IPyNbCell.compare_outputs(cell, now, stored)


@pytest.mark.parametrize(
    "output",
    [
        lambda text: new_output("stream", name="stdout", text=text),
        lambda text: new_output("execute_result", {"text/plain": text}, execution_count=1),
        lambda text: new_output("display_data", {"text/html": f"<b>{text}</b>"}),
    ],
    ids=["stdout", "plain", "html"],
)
def test_nbval_compares_numbers(output):
    stored = [output("f at 0x7f01: loss 4.203, 12 steps")]
    assert _compared(stored, [output("f at 0x7f02: loss 4.202, 12 steps")])
    assert not _compared(stored, [output("f at 0x7f02: loss 4.205, 12 steps")])
    assert not _compared(stored, [output("f at 0x7f02: loss 4.203, 13 steps")])
