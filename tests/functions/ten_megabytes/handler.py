"""Returns a string of `event` bytes as JSON."""


def handler(event, context):
    return "x" * (event - 2)
