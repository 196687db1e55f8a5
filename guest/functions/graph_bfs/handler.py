"""SeBS's graph-bfs: generates a graph and traverses it breadth first, with igraph."""

import hashlib

from graph import graph


def handler(event, context):
    made = graph(event["seed"], event["size"])
    order, layers, parents = made.bfs(0)
    digest = hashlib.sha256(",".join(map(str, order)).encode()).hexdigest()
    return {"vertices": len(order), "layers": len(layers) - 1, "sha256": digest}
