"""Matrix products in tiles: which device computes which rectangle of which product, and what that takes.

product.py   what is to be computed, and on what terms
device.py    the devices and the head as the planner sees them
plan.py      the answer: tiles, predicted seconds, what binds each device
choose.py    `cheapest`: prices the alternatives and picks
"""
