"""What a run of days needs, and the core does not know of: one file a promise.

`extras` join the training loop, `readers` read other layouts, `decode` outlives images that kill their process, `data`
leaves rows out, `checks` refuse early. `lease` keeps a second driver away, `monitor` shows a run, `card` describes it.
"""
