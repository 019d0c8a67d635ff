"""What other ways of using the same machines would take, by the same cost model as matrix products in tiles.

layered.py    a model as layers of equal size, and how work and transfers overlap: what all of them assume
pipeline.py   groups of layers on devices in a row, the rows copies of each other
mesh.py       a grid of devices: the batch along one axis, features of each layer along the other
single.py     one data-centre GPU
"""
