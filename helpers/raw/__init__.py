"""In: files of captioned images. Out: raw rows (id, caption, image bytes, error, source), and decoded images.

Read `inputs` first: files, columns, ids, the row filter. `readers` has Parquet and tar. `images` decodes, crops and
resizes. `production.readers` adds other layouts, and images behind paths.
"""
