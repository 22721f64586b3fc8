"""Text from the module in training, to hear how far it is. The engine is the way to run a checkpoint."""

from __future__ import annotations

import tiktoken
import torch

from twoends.train.model import KimiK3


@torch.no_grad()
def sample(
    model: KimiK3, prompt: str, *, encoder: tiktoken.Encoding, num_new: int, temperature: float, seed: int
) -> str:
    """`prompt` and up to `num_new` tokens after it; stops at [EOS]. Every token runs the whole text again."""
    generator = torch.Generator().manual_seed(seed)
    ids = encoder.encode_ordinary(prompt)
    was_training = model.training
    model.eval()
    for _ in range(num_new):
        logits = model(torch.tensor([ids]))[0, -1].float()
        if temperature == 0:
            token = int(logits.argmax())
        else:
            token = int(torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator))
        if token == model.arch.eos_token_id:
            break
        ids.append(token)
    model.train(was_training)
    return encoder.decode([i for i in ids if i < encoder.n_vocab - len(encoder.special_tokens_set)])
