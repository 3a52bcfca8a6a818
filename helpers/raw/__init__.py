"""In: files of captioned pictures, in any format. Out: raw rows (id, caption, image bytes, error, source).

Read `inputs` first. To copy: `images` alone (bytes to pixels); `inputs` with `readers`, `filters` and the config.
"""
