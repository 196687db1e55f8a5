"""Sprocket's grayscale filter, as FaaSnap uses it: ffmpeg converts a video to grayscale.

The videos of inputs A and B are made when the function is loaded. The papers download them from a
store.
"""

import hashlib
import os

from video import EXACT, ffmpeg, video

for made in ((1, 7), (2, 6)):
    video(*made)


def handler(event, context):
    path = video(event["seed"], event["quantizer"])
    gray = "/tmp/gray.avi"
    ffmpeg("-filter_threads", "1", *EXACT, "-i", path, "-vf", "hue=s=0", "-c:v", "mpeg4", "-qscale:v", "5", *EXACT, gray)
    with open(gray, "rb") as file:
        data = file.read()
    os.remove(gray)
    return {"bytes": os.path.getsize(path), "gray_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
