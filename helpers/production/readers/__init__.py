"""More layouts of raw data: `folder` (images beside texts or tables), `arrow`; `detect` finds out what lies there.

A new layout is a class with the four methods of `raw.readers`, in a file of its own, and a line in `READERS` there.
"""
