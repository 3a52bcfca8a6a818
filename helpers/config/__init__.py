"""In: a notebook's variables. Out: frozen dataclasses, checked. No Ray, no torch. Read `parameters` first.

To copy: `parameters`, `storage`, and the config of your stage (`preprocessing` or `training`).
"""
