"""Release of the resident pages of memory-mapped files."""

import mmap


def release_pages(mapping: mmap.mmap, offset: int, nbytes: int) -> None:
    """Let the operating system drop pages of a file that is mapped for reading: a later access reads the file again.

    No page may have been written to.
    """
    if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
        start = offset - offset % mmap.PAGESIZE
        mapping.madvise(mmap.MADV_DONTNEED, start, offset + nbytes - start)
