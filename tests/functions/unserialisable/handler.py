"""Returns a value that JSON cannot represent."""


def handler(event, context):
    loop = []
    loop.append(loop)
    nested = []
    for _ in range(100_000):
        nested = [nested]
    return {
        "set": {1, 2},
        "bytes": b"abc",
        "nan": float("nan"),
        "infinity": [float("inf")],
        "loop": loop,
        "nested": nested,
        "key": {(1, 2): 3},
    }[event]
