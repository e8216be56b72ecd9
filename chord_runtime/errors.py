"""The errors Chord raises: one family, so that callers can catch ``ChordError`` and print one line."""

from __future__ import annotations

import errno

_ADVICE = {
    errno.EACCES: "check its permissions",
    errno.EPERM: "check its permissions",
    errno.EISDIR: "move that directory away",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "the whole system has too many files open: end what holds them",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f), or choose a file system that takes larger ones",
    errno.EDQUOT: "make room, or choose another disk",
    errno.ENOSPC: "make room, or choose another disk",
}


def advice(error: OSError, otherwise: str) -> str:
    """What helps against an error of the system."""
    return _ADVICE.get(error.errno or 0, otherwise)


class ChordError(Exception):
    """Base of every error that Chord raises on purpose. Its text says what was found, where, and what to do."""


class UsageError(ChordError):
    """A call or a command line that cannot be meant: wrong dtype, shape, device, or options that exclude each other."""


class CheckpointError(ChordError):
    """The source checkpoint is not one Chord supports, or its files contradict each other."""


class SourceError(ChordError):
    """The source could not be read: network, permissions, a short or changed file."""


class FormatError(ChordError):
    """A packed directory that is unfinished, altered, or of another format version, layout or rank."""


class UnreadableError(FormatError):
    """A file of a packed directory that is there and cannot be read now: nothing is said of its bytes."""


class ScaleError(CheckpointError):
    """A scale that the packed format cannot hold exactly: NaN, infinite, or out of range."""


class ModeError(ChordError):
    """An operation was called on a weight that was not packed for it."""


class OutputError(ChordError):
    """The output directory cannot be used: other options, locked by another run, or not enough space."""


class FileSizeError(OutputError):
    """A file may not become as large as it must: running again does not mend that, as it may mend a full disk."""


class Unfinished(ChordError):
    """A conversion ended early, by its ``__cause__``; what it finished is kept and the same call goes on from there."""


class KernelError(ChordError):
    """A CUDA kernel cannot be compiled, loaded or launched here."""
