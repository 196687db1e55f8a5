"""The video of an event: one that it brings, or one in 480p, which is the same for the same seed on
every machine."""

import os
import subprocess

from given import given, of_event

# Bit-exact code only, and one thread, so that the result is the same on every machine.
EXACT = ["-threads", "1", "-fflags", "+bitexact", "-flags", "+bitexact", "-sws_flags", "bitexact+accurate_rnd", "-idct", "simple"]


def ffmpeg(*arguments):
    subprocess.run(["ffmpeg", "-hide_banner", "-loglevel", "error", "-nostdin", "-y", *arguments], check=True)


def video(seed, quantizer, seconds=1):
    """The path of the video, which is made once. A smaller quantizer makes a larger file."""
    path = "/tmp/video-%d-%d-%s.avi" % (seed, quantizer, seconds)
    if not os.path.exists(path):
        source = "testsrc2=size=854x480:rate=24:duration=%s,noise=all_seed=%d:alls=8,hue=h=%d" % (seconds, seed, seed * 40)
        ffmpeg("-filter_threads", "1", "-f", "lavfi", "-i", source, "-c:v", "mpeg4", "-qscale:v", str(quantizer),
               *EXACT, path + ".new.avi")
        os.rename(path + ".new.avi", path)
    return path


def path_of(event):
    """The path of the event's video."""
    kind = of_event(event)
    if kind == "seed":
        return video(event["seed"], event["quantizer"], event.get("seconds", 1))
    if kind == "file":
        # It may be larger than memory: only its path is used.
        if not os.path.isfile(event["file"]):
            raise ValueError("the guest has no file %s" % event["file"])
        return event["file"]
    path = "/tmp/given.video"
    with open(path, "wb") as file:
        file.write(given(event))
    return path
