"""What goes inside the Ray Data and Ray Train calls of the three notebooks.

Ground floor first, imports only point down (see each module's first line):
storage, schema, config, images -> encoder, segments -> preprocess, ingest, diffusion, parallel, checkpoint
-> train, evaluate; figures, costs, captioned_shapes and tiny_sd stand alone.
"""
