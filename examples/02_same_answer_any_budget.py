"""The same ids and the same bits of every logit, from the floor to ample memory."""

import twoends
from twoends.checkpoint.shipped import shipped_model
from twoends.engine.open import Checkpoint


def main() -> None:
    checkpoint = Checkpoint.open(shipped_model())
    generous = checkpoint.plan(ram_bytes=10**9, context_tokens=64, chunk_tokens=1, reference=False)
    # The floor moves with what this process already holds, so leave it some room.
    for ram_bytes in (generous.floor_bytes + 24_000_000, generous.floor_bytes + 30_000_000, 10**9):
        with twoends.open_model(ram=ram_bytes, context=64, chunk=4) as model:
            outcome = model.generate("The king went to", num_new=24)
            read_bytes = model.engine.counters.bytes_read
        read = f"{read_bytes / 1e6:7.1f} MB"
        print(f"budget {ram_bytes / 1e6:7.1f} MB  read {read}  logits {outcome.logits_digest[:16]}")


if __name__ == "__main__":
    main()
