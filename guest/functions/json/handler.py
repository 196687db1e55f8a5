"""FunctionBench's json_dumps_loads: parses a JSON document and serialises it, indented.

FunctionBench downloads the document. This function generates it from the event's seed, so that the
answer is known and no network is needed, or takes what the event brings.
"""

import hashlib
import json

from given import given


def document(seed, records):
    """A list of `records` records, the same for the same seed on every machine."""
    state = seed
    made = []
    for number in range(records):
        # Knuth's MMIX generator: the low bits of such a generator are poor, the high ones serve.
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        made.append(
            {
                "id": number,
                "name": "record-%08x" % (state >> 32),
                "tags": ["t%d" % (state >> shift & 15) for shift in (40, 48, 56)],
                "score": (state >> 44) / 64,
                "active": state >> 63 == 1,
                "parent": None if number == 0 else (state >> 24) % number,
            }
        )
    return made


def handler(event, context):
    text = given(event)
    if text is None:
        text = json.dumps(document(event["seed"], event["records"]))
    loaded = json.loads(text)
    written = json.dumps(loaded, indent=4)
    return {
        "records": len(loaded) if isinstance(loaded, (list, dict)) else 1,
        "read_bytes": len(text),
        "written_bytes": len(written),
        "sha256": hashlib.sha256(written.encode()).hexdigest(),
    }
