"""``python -m chord_runtime``: the same as ``chord``."""

from chord_runtime.cli import main

main()
