"""``chord bench``: the kernels beside their peers, on the shapes of Kimi K2.x, at points that others have published.

``cases`` says what is measured, ``peers`` what others got, ``run`` measures, ``report`` and ``plot`` show. All but
``run`` and what it calls work on recorded numbers alone, without a GPU.
"""
