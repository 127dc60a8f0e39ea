"""A language model without attention, in one file: define it, train it for a minute on a CPU, let it write.

    python examples/nanoaft.py              # learns from the sources of Python's standard library
    python examples/nanoaft.py book.txt     # or from any text

The model reads bytes and predicts the next one. Its layers mix tokens by AFT-simple (Zhai et al. 2021,
arXiv:2105.14103, Eq. 5) with two additions that its plain form lacks: a convolution over four tokens, which gives it
an order, and a decay of each feature, which lets it forget. In symbols, for token t and each of D features alone:

    q, k, v = conv(W_q x), conv(W_k x), conv(W_v x)       queries, keys and values
    n_t     = exp(-r) n_{t-1} + exp(k_t) v_t              values seen so far, each weighed by exp of its key
    z_t     = exp(-r) z_{t-1} + exp(k_t)                  the weights alone
    y_t     = W_o [sigmoid(q_t) * norm(n_t / z_t)]        a weighted mean, scaled by the query

Nothing compares two tokens, so the cost grows with the length T, not with T * T, and what must be remembered between
two tokens is n, z and the last three inputs of the convolution: the same few numbers after ten bytes or ten million.

Needs torch 2.9 or later and nothing else. Shapes: B batch, T tokens, D features.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

State = tuple[Tensor, Tensor, Tensor]
"""What one layer remembers: the convolution's last inputs (B, 3, 3 D), m (B, D), and n and z side by side (B, 2, D)."""


def shifted(a: Tensor, n: int) -> Tensor:
    """Move a (B, T, ...) by n tokens towards the future; zeros enter at the front."""
    return torch.cat([torch.zeros_like(a[:, :n]), a[:, :-n]], 1)


def scan(a: Tensor, x: Tensor) -> Tensor:
    """Compute h_t = a_t h_{t-1} + x_t for all t at once, with h_{-1} = 0.

    A loop over t would take T steps, each waiting for the one before. Here the stretch that h_t has summed doubles in
    every round: 1, 2, 4 ... tokens. That takes log2(T) rounds, and inside a round all tokens are independent.

    Args:
        a: (B, T, 1, D), the factors, none above 1.
        x: (B, T, C, D), what is added.

    Returns:
        h: (B, T, C, D).
    """
    n = 1
    while n < x.shape[1]:
        x = x + a * shifted(x, n)
        a = a * shifted(a, n)
        n *= 2
    return x


def decayed_mean(k: Tensor, v: Tensor, rate: Tensor, m: Tensor, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute n_t / z_t with n_t = exp(-r) n_{t-1} + exp(k_t) v_t and z_t = exp(-r) z_{t-1} + exp(k_t).

    exp(k) overflows for large keys, so n and z are kept in units of exp(m_t), where m_t is the largest log-weight
    among the tokens so far: m_t = max(m_{t-1} - r, k_t). The unit cancels in n / z, so it needs no gradient. Every
    factor below is then at most 1, for any finite keys, and a later key cannot spoil an earlier row.

    Args:
        k, v: (B, T, D), keys and values of the new tokens.
        rate: (D,), r >= 0.
        m, sums: (B, D) and (B, 2, D), what the tokens before left: the unit, and n and z in it.

    Returns:
        The means (B, T, D), and m and sums after the last token.
    """
    with torch.no_grad():
        drift = rate * torch.arange(k.shape[1] + 1)[:, None]
        units = (torch.cat([m[:, None], k], 1) + drift).cummax(1).values - drift  # the recursion of m, unrolled
        before, now = units[:, :-1], units[:, 1:]
    keep = torch.exp(before - rate - now)[:, :, None]
    add = torch.exp(k - now)[:, :, None] * torch.stack([v, torch.ones_like(v)], 2)
    add = torch.cat([add[:, :1] + keep[:, :1] * sums[:, None], add[:, 1:]], 1)
    total = scan(keep, add)
    return total[:, :, 0] / total[:, :, 1], now[:, -1], total[:, -1]


class Mixer(nn.Module):
    """Mix tokens by AFT with a short convolution, a decay per feature and a norm; the equations stand at the top."""

    def __init__(self, dim: int, heads: int = 8, taps: int = 4):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(dim, dim) for _ in range(4))
        self.conv = nn.Parameter(torch.zeros(taps, 1, 3 * dim))
        self.conv.data[-1] = 1.0  # the last tap is the token itself: at the start it reads no other
        # Half of a weight is forgotten after 1 token in the first feature, after 4096 in the last.
        half_lives = torch.logspace(0, math.log10(4096), dim)
        self.rate = nn.Parameter((math.log(2) / half_lives).expm1().log())  # r = softplus(rate) stays positive

    def empty_state(self, batch: int) -> State:
        """Return the state before the first token: no inputs, and sums of nothing in units of exp(-inf) = 0."""
        dim = self.rate.numel()
        inputs = torch.zeros(batch, len(self.conv) - 1, 3 * dim)
        return inputs, torch.full((batch, dim), -torch.inf), torch.zeros(batch, 2, dim)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Map the next tokens (B, T, D) to the same shape, and the state before them to the state after them.

        Training passes whole sequences, generation one token at a time. Both are this code, so they agree.
        """
        inputs, m, sums = state
        inputs = torch.cat([inputs, torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)], 1)
        mixed = sum(tap * inputs[:, j : j + x.shape[1]] for j, tap in enumerate(self.conv))
        q, k, v = mixed.chunk(3, -1)
        mean, m, sums = decayed_mean(k, v, F.softplus(self.rate), m, sums)
        by_head = mean.unflatten(-1, (self.heads, -1))  # a mean of many values is small; the norm makes it loud again
        mean = F.rms_norm(by_head, by_head.shape[-1:], eps=1e-6).flatten(-2)
        return self.out_proj(torch.sigmoid(q) * mean), (inputs[:, x.shape[1] :], m, sums)


class Block(nn.Module):
    """One layer: x + mixer(norm(x)), then x + mlp(norm(x)). Tokens meet in the mixer only."""

    def __init__(self, dim: int):
        super().__init__()
        self.mixer_norm, self.mixer = nn.LayerNorm(dim), Mixer(dim)
        self.mlp_norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Map tokens (B, T, D) and the mixer's state to the same after this layer."""
        mixed, state = self.mixer(self.mixer_norm(x), state)
        x = x + mixed
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)))), state


class Model(nn.Module):
    """Predict the next byte: embedding, blocks, norm, head. Nothing is added for positions: the mixers know order."""

    def __init__(self, dim: int = 128, layers: int = 3):
        super().__init__()
        self.embed = nn.Embedding(256, dim)
        self.blocks: Any = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 256, bias=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                writes = name.endswith(("out_proj.weight", "down.weight"))  # to x: start quieter, as 2 per layer add up
                nn.init.normal_(p, std=0.02 / (2 * layers) ** 0.5 if writes else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def empty_state(self, batch: int) -> list[State]:
        """Return one empty state per layer."""
        return [block.mixer.empty_state(batch) for block in self.blocks]

    def forward(self, tokens: Tensor, state: list[State] | None = None) -> tuple[Tensor, list[State]]:
        """Map the next bytes (B, T) to logits of the byte after each (B, T, 256), and to the new state."""
        state = self.empty_state(len(tokens)) if state is None else state
        x, after = self.embed(tokens), []
        for block, old in zip(self.blocks, state, strict=True):
            x, new = block(x, old)
            after.append(new)
        return self.head(self.norm(x)), after


def read_text(path: str | None) -> Tensor:
    """Return a text file, or else the sources of Python's standard library, as bytes in a tensor."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted([*folder.glob("*.py"), *folder.glob("[a-z]*/*.py")]) if path is None else [Path(path)]
    files = [f for f in files if path or not {"test", "site-packages"} & set(f.relative_to(folder).parts)]
    return torch.frombuffer(bytearray(b"\n".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def bits_per_byte(model: Model, rows: Tensor) -> Tensor:
    """Return the mean of -log2 p(byte) over bytes 1.. of each row (B, T + 1): 8 if nothing is known, 0 if all is."""
    logits, _ = model(rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()) / math.log(2)


def train(model: Model, text: Tensor, *, steps: int, rows: int = 8, length: int = 128) -> None:
    """Train on random pieces of the text, and print the loss on them and on the last 5 %, which are held out.

    Muon updates the matrices inside the blocks, AdamW all that is left.
    """
    cut = int(len(text) * 0.95)
    held_out = text[cut:].unfold(0, length + 1, length + 1)[:32].long()
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    optimizers = [torch.optim.AdamW(rest, lr=0.01, betas=(0.9, 0.95)), torch.optim.Muon(matrices, lr=0.04)]
    schedule = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 - step / steps) for o in optimizers]
    began = time.perf_counter()
    for step in range(steps):
        starts = torch.randint(cut - length, (rows, 1))
        loss = bits_per_byte(model, text[starts + torch.arange(length + 1)].long())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, its_rate in zip(optimizers, schedule, strict=True):
            optimizer.step()
            its_rate.step()
        model.zero_grad()
        if step % max(1, steps // 10) == 0 or step == steps - 1:
            with torch.no_grad():
                unseen = bits_per_byte(model, held_out).item()
            took = f"{time.perf_counter() - began:.0f} s"
            print(f"step {step:4d}: {loss:.3f} bits per byte, {unseen:.3f} on the held-out text, {took}", flush=True)


@torch.no_grad()
def write(model: Model, prompt: bytes, count: int, temperature: float = 0.8) -> bytes:
    """Continue the prompt by ``count`` bytes. Each costs the same, however many came before."""
    logits, state = model(torch.tensor([list(prompt)]))  # the whole prompt in one call
    out = list(prompt)
    for _ in range(count):
        token = torch.multinomial(torch.softmax(logits[:, -1] / temperature, -1), 1)
        out.append(int(token))
        logits, state = model(token, state)
    return bytes(out)


def size(state: list[State]) -> int:
    """Return the bytes of a state."""
    return sum(a.numel() * a.element_size() for layer in state for a in layer)


def main() -> None:
    """Train, write, and show that the state does not grow."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("text", nargs="?", help="a text file; without one, Python's own sources")
    parser.add_argument("--steps", type=int, default=300, help="training steps (default 300, about a minute)")
    parser.add_argument("--bytes", type=int, default=600, help="bytes to write (default 600)")
    parser.add_argument("--prompt", default="def ", help='what the text begins with (default "def ")')
    given = parser.parse_args()

    torch.manual_seed(0)
    text, model = read_text(given.text), Model()
    if len(text) < 5000:
        parser.error(f"the text has {len(text):,} bytes; give one of at least 5,000, and better a million")
    print(f"{len(text):,} bytes of text, {sum(p.numel() for p in model.parameters()):,} parameters")
    train(model, text, steps=given.steps)
    print(f"\n{write(model, given.prompt.encode(), given.bytes).decode(errors='replace')}\n")
    for length in (10, 1000):
        _, state = model(text[None, :length].long())
        print(f"state after {length:,} bytes: {size(state):,} bytes")


if __name__ == "__main__":
    main()
