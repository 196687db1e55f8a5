"""The picture of an event: one that it brings, or a photograph-like one, which is the same for the
same seed on every machine: whole numbers only."""

import io

import numpy
from PIL import Image, UnidentifiedImageError

from given import given


def picture(seed, width, height):
    """Soft colours with some grain."""
    random = numpy.random.Generator(numpy.random.PCG64(seed))
    coarse = random.integers(0, 256, (height // 32 + 2, width // 32 + 2, 3), dtype=numpy.uint8)
    soft = Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR)
    grain = random.integers(0, 24, (height, width, 1), dtype=numpy.uint8)
    return Image.fromarray((numpy.asarray(soft) // 8 * 7 + grain).astype(numpy.uint8))


def jpeg(seed, width, height):
    """The same as the bytes of a JPEG file."""
    made = io.BytesIO()
    picture(seed, width, height).save(made, "JPEG", quality=75)
    return made.getvalue()


def file_of(event):
    """The bytes of the event's picture file."""
    data = given(event)
    return jpeg(event["seed"], event["width"], event["height"]) if data is None else data


def opened(data):
    """The picture in the bytes of a file, in RGB."""
    try:
        image = Image.open(io.BytesIO(data))
    except UnidentifiedImageError:
        raise ValueError("the %d bytes are not a picture that PIL reads, such as a JPEG or PNG file" % len(data)) from None
    return image if image.mode == "RGB" else image.convert("RGB")
