"""Bytes on disk: what a checkpoint directory holds, where it lies, and how small ones are made.

config.py       config.json -> ModelConfig; refuses to guess
names.py        the only file that knows the checkpoint's tensor names, shapes and dtypes
safetensors.py  one shard's header, read and checked
index.py        all shards -> where every tensor lies
mxfp4.py        the 4-bit block format
writer.py       writes shards in the released layout
tiny.py         small synthetic checkpoints with the real tensor graph
"""
