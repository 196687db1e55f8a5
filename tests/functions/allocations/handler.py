"""Does the work of another function, and reports which pages the guest's kernel allocated since a
call with null. The kernel was booted to print the tracepoint kmem:mm_page_alloc into its log."""

import os
import re

import work

ALLOCATED = re.compile(rb"mm_page_alloc: .*pfn=0x([0-9a-f]+) order=([0-9]+) ")
log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)


def handler(event, context):
    if event is None:
        os.lseek(log, 0, os.SEEK_END)
        return None
    answer = work.handler(event, context)
    return {"answer": answer, "allocated": list(allocated())}


def allocated():
    """The first page and the number of pages of each allocation."""
    while True:
        try:
            record = os.read(log, 8192)
        except BlockingIOError:
            return
        if found := ALLOCATED.search(record):
            page, order = found.groups()
            yield [int(page, 16), 1 << int(order)]
