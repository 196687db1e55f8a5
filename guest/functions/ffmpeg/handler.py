"""Sprocket's grayscale filter, which the papers name: ffmpeg converts a video with hue=s=0.

FaaSnap's artifact mirrors the video instead (hflip). The videos of inputs A and B are made when the
function is loaded. The papers download them from a store.
"""

import hashlib
import os
import subprocess

from video import EXACT, ffmpeg, path_of, video

for made in ((1, 7), (2, 6)):
    video(*made)


def handler(event, context):
    path = path_of(event)
    gray = "/tmp/gray.avi"
    try:
        ffmpeg("-filter_threads", "1", *EXACT, "-i", path, "-vf", "hue=s=0", "-c:v", "mpeg4", "-qscale:v", "5", *EXACT, gray)
    except subprocess.CalledProcessError:
        raise ValueError("ffmpeg cannot convert the video; its messages are in the log") from None
    with open(gray, "rb") as file:
        data = file.read()
    os.remove(gray)
    return {"bytes": os.path.getsize(path), "gray_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
