"""The benchmark behind ``python -m gdn_multi bench``: our backends beside every installed peer, in one run.

rows.py      which shapes: the standard tables, and how a user's own row is written
inputs.py    the tensors of a row, drawn as a GDN model would make them
truth.py     what a row's answer is, in float64
ours.py      the calls of this library that are measured
peers.py     the calls of other packages
timing.py    CUDA graphs, a flushed L2, medians and host time; the wall clock on a CPU
runner.py    goes through rows and calls, checks each answer once, reports progress
report.py    tables, summary, JSON
plot.py      PNG
"""
