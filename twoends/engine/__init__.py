"""Out of core: from bytes on disk to logits within a budget. Read `forward.py` first."""
