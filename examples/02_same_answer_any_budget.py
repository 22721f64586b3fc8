"""The same ids and the same bits of every logit, from ample memory down to the floor."""

import twoends
from twoends.checkpoint.shipped import shipped_model
from twoends.engine.open import Checkpoint


def run(ram_bytes: int) -> None:
    with twoends.open_model(ram=ram_bytes, context=64, chunk=4) as model:
        outcome = model.generate("The king went to", num_new=24)
        read_bytes = model.engine.counters.bytes_read
    read = f"{read_bytes / 1e6:7.1f} MB"
    print(f"budget {ram_bytes / 1e6:7.1f} MB  read {read}  logits {outcome.logits_digest[:16]}")


def main() -> None:
    # First, so that the process holds by then what it will hold: the floor counts that too.
    run(10**9)
    checkpoint = Checkpoint.open(shipped_model())
    plan = checkpoint.plan(ram_bytes=10**9, context_tokens=64, chunk_tokens=4, reference=False)
    for spare_bytes in (4_000_000, 2_000_000):
        run(plan.floor_bytes + spare_bytes)


if __name__ == "__main__":
    main()
