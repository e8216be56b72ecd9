"""``python -m chord_convert``: the same as ``chord-convert``."""

from chord_convert.cli import main

main()
