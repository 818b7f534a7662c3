"""A small GPT that predicts the next byte of a text. Its text is the source of Python's own library.

The shape is GPT-2's, as in Karpathy's nanoGPT: a transformer whose blocks normalise first.

    python scripts/gpt.py    # trains for about a minute and prints the loss
"""

import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    """Each position looks at itself and at all earlier ones; (batch, tokens, width) to the same shape."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        """Mixes the values of earlier positions, weighted by how well query and key fit."""
        batch, tokens, width = x.shape
        # Query, key and value, each (batch, heads, tokens, width / heads).
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


class MLP(nn.Module):
    """Works on each position alone, four times as wide inside."""

    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        """(batch, tokens, width) to the same shape."""
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and an MLP, each of which adds its result to its input."""

    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.mlp = nn.LayerNorm(width), MLP(width)

    def forward(self, x):
        """(batch, tokens, width) to the same shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Predicts the next byte at each position; with ``recompute``, backward computes each block's forward again."""

    def __init__(self, width=128, layers=6, heads=4, context=128, recompute=False):
        super().__init__()
        self.recompute = recompute
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)  # as GPT-2 begins

    def forward(self, tokens):
        """Bytes, int64 (batch, tokens), to logits, (batch, tokens, 256)."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.norm(x))


def find_loss(model, pieces):
    """Cross-entropy of each next byte, in nats; ``pieces`` is int64 (batch, tokens + 1)."""
    logits = model(pieces[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten())


def load_text():
    """The source of Python's library, uint8 (bytes,): some megabytes that every machine has."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def draw_pieces(text, batch, tokens, seed):
    """Draws ``batch`` pieces of ``tokens + 1`` bytes from anywhere in the text; int64 (batch, tokens + 1)."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - tokens, (batch, 1), generator=generator)
    return text[starts + torch.arange(tokens + 1)].long()


def main():
    """Trains a small one."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text, model = load_text(), GPT(layers=4).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(501):
        loss = find_loss(model, draw_pieces(text, 16, 64, seed=step).to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:3}: loss {loss.item():.2f} nats per byte")


if __name__ == "__main__":
    main()
