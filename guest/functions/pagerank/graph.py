"""A random graph with preferential attachment, the same for the same seed on every machine."""

import random

import igraph


def graph(seed, size):
    """igraph draws from Python's `random`."""
    random.seed(seed)
    igraph.set_random_number_generator(random)
    return igraph.Graph.Barabasi(size, 10)
