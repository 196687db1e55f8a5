"""SeBS's graph-pagerank: generates a graph and ranks its vertices, with igraph."""

from graph import graph


def handler(event, context):
    made = graph(event["seed"], event["size"])
    ranks = made.pagerank()
    first = max(range(len(ranks)), key=ranks.__getitem__)
    return {
        "vertices": made.vcount(),
        "edges": made.ecount(),
        "first": first,
        "rank": round(ranks[first], 12),
        "sum": round(sum(ranks), 9),
    }
