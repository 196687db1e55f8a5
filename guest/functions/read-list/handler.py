"""FaaSnap's synthetic read-list: reads a list of 512 MiB that exists before the freeze, once, a
page at a time.

Importing the module makes the list. Its size is limited by the machine's memory and at most 512
MiB. The event sets how much of it is read.
"""

import os

PAGE = 4096
MOST = 512 << 20


def memory():
    """Bytes of the machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def first_word(page):
    """The first word of a page: never zero, so that no page is a zero page."""
    return (page * 2654435761 + 1) % 2**32 | 1


def made(size):
    """A list of `size` bytes in which every page begins with a different word."""
    made = bytearray(size)
    words = memoryview(made).cast("I")
    for page in range(size // PAGE):
        words[page * PAGE // 4] = first_word(page)
    return words


# A machine of 1 GiB, of which the kernel reserves a part, gets a list of 512 MiB.
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
