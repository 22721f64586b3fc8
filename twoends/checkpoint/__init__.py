"""Bytes on disk: what a checkpoint directory holds, where it lies, and how small ones are made.

config.py       config.json -> ModelConfig; refuses to guess (config_fields; config_write is the way back)
names.py        the only file that knows the checkpoint's tensor names, shapes and dtypes
safetensors.py  one shard's header, read and checked
index.py        all shards -> where every tensor lies (index_file, index_tables, index_cache)
predicted.py    the same for a release that is not here
mxfp4.py        the 4-bit block format
layout.py       which tensor goes where in the releases, to the byte
writer.py       writes shards in that layout
tiny.py         small synthetic checkpoints with the real tensor graph (presets, synthetic, tiny_vocab)
"""
