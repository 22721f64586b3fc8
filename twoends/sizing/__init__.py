"""What a model needs, how fast it will be, what it costs: arithmetic, before it is bought.

footprint (bytes of every part) -> fit (which memory holds it) -> speed (bytes over links) -> money. Every
figure says whether it was measured, computed or reported, and whose it is (evidence.py).
"""
