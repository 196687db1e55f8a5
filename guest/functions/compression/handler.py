"""FunctionBench's compression: writes a file, compresses it, and checks its decompression.

The file is text generated from the event's seed, with repeated words as in natural language, or
what the event brings.
"""

import hashlib
import os
import tempfile
import zipfile

from given import given

WORDS = ["snow", "firn", "ice", "glacier", "crevasse", "melt", "summer", "ridge", "wind", "drift", "cold", "light", "névé", "moraine"]


def text(seed, size):
    """`size` bytes of words, the same for the same seed on every machine."""
    state = seed
    made = bytearray()
    while len(made) < size:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        made += b"%s %d " % (WORDS[(state >> 40) % len(WORDS)].encode(), (state >> 33) % 1000)
    return bytes(made[:size])


def handler(event, context):
    plain = given(event)
    if plain is None:
        plain = text(event["seed"], event["bytes"])
    with tempfile.TemporaryDirectory() as folder:
        source, packed = os.path.join(folder, "source.txt"), os.path.join(folder, "packed.zip")
        with open(source, "wb") as file:
            file.write(plain)
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            archive.write(source, "source.txt")
        with zipfile.ZipFile(packed) as archive:
            unpacked = archive.read("source.txt")
            packed_bytes = archive.getinfo("source.txt").compress_size
    return {"bytes": len(plain), "packed_bytes": packed_bytes, "sha256": hashlib.sha256(unpacked).hexdigest()}
