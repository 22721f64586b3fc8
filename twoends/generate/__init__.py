"""From logits to text.

tokenizer.py        text <-> ids; tokenizer_files.py reads and checks its two files
sampler.py          logits -> id; greedy is the reference
stop.py             where a stop string ends the text
stream.py           ids -> pieces of text as they become sure
"""
