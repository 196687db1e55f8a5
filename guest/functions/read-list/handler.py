"""FaaSnap's synthetic read-list: reads a list of 512 MiB that was made before the freeze, once, a page at a time.

The list is made when the module is imported, of half the machine's memory and 512 MiB at most, so that a small
machine has a small one. The event says how much of it is read.
"""

import os

PAGE = 4096
MOST = 512 << 20


def memory():
    """Bytes of memory that the machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def first_word(page):
    """What the page of this number begins with: never zero, so that no page is a zero page."""
    return (page * 2654435761 + 1) % 2**32 | 1


def made(size):
    """A list of `size` bytes: every page begins with a word of its own."""
    made = bytearray(size)
    words = memoryview(made).cast("I")
    for page in range(size // PAGE):
        words[page * PAGE // 4] = first_word(page)
    return words


# 1 GiB of machine, of which the kernel keeps some for itself, has a list of 512 MiB.
LIST = made(MOST if memory() > MOST * 3 // 2 else memory() // 4 // PAGE * PAGE)


def handler(event, context):
    pages = (event["mebibytes"] << 20) // PAGE
    if pages * PAGE > len(LIST) * 4:
        raise ValueError("the list has %d MiB: boot with more memory" % (len(LIST) * 4 >> 20))
    step = PAGE // 4
    total = 0
    for at in range(0, pages * step, step):
        total += LIST[at]
    return {"pages": pages, "sum": total}
