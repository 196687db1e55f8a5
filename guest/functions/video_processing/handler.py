"""FunctionBench's video_processing: OpenCV converts a video to grayscale, frame by frame."""

import math
import os

import cv2

from video import path_of, video

cv2.setNumThreads(1)
for made in ((1, 7), (2, 6)):
    video(*made)


def handler(event, context):
    path = path_of(event)
    gray = "/tmp/gray-%d.avi" % os.getpid()
    source = cv2.VideoCapture(path)
    if not source.isOpened():
        raise ValueError("OpenCV cannot read the video")
    size = int(source.get(cv2.CAP_PROP_FRAME_WIDTH)), int(source.get(cv2.CAP_PROP_FRAME_HEIGHT))
    target = cv2.VideoWriter(gray, cv2.VideoWriter_fourcc(*"XVID"), source.get(cv2.CAP_PROP_FPS), size)
    frames = light = 0
    while frames < event.get("frames", math.inf):
        read, frame = source.read()
        if not read:
            break
        converted = cv2.cvtColor(frame, cv2.COLOR_BGR2GRAY)
        cv2.imwrite("/tmp/frame.jpg", converted)
        target.write(cv2.imread("/tmp/frame.jpg"))
        light += float(converted.mean())
        frames += 1
    source.release()
    target.release()
    if frames == 0:
        raise ValueError("the video has no frames")
    written = os.path.getsize(gray)
    os.remove(gray)
    return {"frames": frames, "width": size[0], "height": size[1], "light": round(light / frames, 3), "written_bytes": written}
