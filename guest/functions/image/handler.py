"""FunctionBench's image_processing, the part that the papers use: rotates a JPEG picture."""

import hashlib
import io

from PIL import Image

from picture import file_of, opened

ANGLES = [Image.Transpose.ROTATE_90, Image.Transpose.ROTATE_180, Image.Transpose.ROTATE_270]


def handler(event, context):
    data = file_of(event)
    answer = {"bytes": len(data)}
    with opened(data) as image:
        for angle in ANGLES:
            rotated = io.BytesIO()
            turned = image.transpose(angle)
            turned.save(rotated, "JPEG")
            answer[angle.name.lower()] = hashlib.sha256(turned.tobytes()).hexdigest()
    answer["rotated_bytes"] = len(rotated.getvalue())
    return answer
