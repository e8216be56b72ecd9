"""CUDA mechanics: selection, compilation, launch. No other package knows a tile, a stream or a compiler.

Importing this package needs neither CUDA nor a GPU; its modules load the CUDA bindings at their first use.
"""
