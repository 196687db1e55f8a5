"""FaaSnap's synthetic mmap: maps anonymous memory, 512 MiB of it, and writes one byte into every
page."""

import mmap

PAGE = 4096


def handler(event, context):
    size = event["mebibytes"] << 20
    value = event["value"]
    with mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        for at in range(0, size, PAGE):
            memory[at] = value
        return {"pages": size // PAGE, "last": memory[size - PAGE], "beside": memory[size - 1]}
