"""NanoGPT as the paper trains it (124M on FineWeb-Edu), at any size."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, relu, rms_norm, scaled_dot_product_attention

from steadynorm.lab.models.loss import linear_cross_entropy
from steadynorm.lab.models.parts import Embedding, Linear, check_sizes


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT; the defaults are the paper's 124M."""

    layers: int = 12
    width: int = 768
    heads: int = 6
    vocab: int = 50304  # GPT-2's 50257, padded to a multiple of 128
    context: int = 1024  # largest number of tokens per sequence
    mlp_ratio: int = 4
    tied: bool = True  # whether the embedding is the output layer as well

    def __post_init__(self) -> None:
        """Raise ValueError for sizes that do not fit each other.

        >>> GPTConfig(width=96, heads=5)
        Traceback (most recent call last):
        ValueError: GPTConfig: heads=5 do not divide width=96; use for example width=95
        """
        check_sizes(self)
        if self.width // self.heads % 2:
            raise ValueError(
                f"GPTConfig: width={self.width} over heads={self.heads} gives heads of {self.width // self.heads}, "
                f"and rotary needs an even size; use for example width={2 * self.width}"
            )


class GPT(nn.Module):
    """Causal transformer whose block matrices all suit the spectral lmo, with one table for input and output if tied.

        x = E[tokens];   x += attention(norm x);   x += mlp(norm x);   logits = E norm x
        attention: q, k = rotary(norm q), rotary(norm k) per head;   mlp: 2 W_2 relu(W_1 x)^2

    `norm` is RMSNorm without parameters; there are no biases and no dropout. q, k and v are separate matrices (as fast
    as a fused one here), so that any optimizer treats them one by one. Parameters stay fp32; use autocast for bf16.

    Weights are drawn at construction from torch's global generator. For a model on the meta device, call
    `to_empty(device=...)`, then `init_weights()`, which also fills the rotary tables.

    >>> model = GPT(GPTConfig(layers=1, width=8, heads=2, vocab=16, context=4))
    >>> tokens = torch.tensor([[3, 1, 4, 1]])
    >>> model(tokens).shape, model(tokens, targets=tokens).shape
    (torch.Size([1, 4, 16]), torch.Size([]))
    """

    cos: Tensor  # (context, head size / 2)
    sin: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.head = None if config.tied else Linear(config.width, config.vocab, bias=False)
        table = (config.context, config.width // config.heads // 2)
        self.register_buffer("cos", torch.empty(table, dtype=torch.float32), persistent=False)
        self.register_buffer("sin", torch.empty(table, dtype=torch.float32), persistent=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Draw E, the head, q, k, v and W_1 uniformly within 1 / sqrt(fan-in); set attention's output and W_2 to zero."""
        bound = 1 / math.sqrt(self.config.width)
        for name, parameter in self.named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                parameter.zero_()
            else:
                parameter.uniform_(-bound, bound, generator=generator)
        angles = rotary_angles(*self.cos.shape)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def get_output_embeddings(self) -> nn.Module:
        """Return the layer whose weight is the output layer, for `param_groups`."""
        return self.head or self.embedding

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return fp32 logits, or with targets their mean cross-entropy without all logits in memory at once.

        The loss is part of this call because DDP, FSDP and torch.compile only see calls of the model.

        Args:
            tokens: (batch, length), with length at most the context.
            targets: (batch, length), the token that follows each.

        Returns:
            (batch, length, vocab), or a scalar.
        """
        if tokens.ndim != 2 or not 1 <= tokens.shape[1] <= self.config.context:
            raise ValueError(
                f"tokens {tuple(tokens.shape)}: pass (batch, length) with length 1 to context={self.config.context}, "
                "or build the model with a longer context"
            )
        if targets is not None and targets.shape != tokens.shape:
            raise ValueError(f"targets {tuple(targets.shape)} must have the shape of tokens {tuple(tokens.shape)}")
        length = tokens.shape[1]
        x, cos, sin = self.embedding(tokens), self.cos[:length], self.sin[:length]
        for block in self.blocks:
            x = block(x, cos, sin)
        x, weight = norm(x), (self.head or self.embedding).weight
        if targets is None:
            return linear(x, weight).float()
        return linear_cross_entropy(x.flatten(0, 1), weight, targets.flatten())


class Block(nn.Module):
    """Compute x + attention(norm x), then x + mlp(norm x)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(norm(x), cos, sin)
        return x + self.mlp(norm(x))


class Attention(nn.Module):
    """Compute causal softmax(q k^T / sqrt(head size)) v, with q and k of unit RMS before rotation."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.q, self.k, self.v, self.out = (Linear(config.width, config.width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = rotate(norm(q), cos, sin), rotate(norm(k), cos, sin)  # (batch, heads, length, head size)
        mixed = scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Compute 2 W_2 relu(W_1 x)^2; the factor keeps the size of x and is cheapest after W_2."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = Linear(config.width, config.mlp_ratio * config.width, bias=False)
        self.down = Linear(config.mlp_ratio * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.down(relu(self.up(x)).square())


def norm(x: Tensor) -> Tensor:
    """Divide x by its root mean square along the last dimension, with torch's default eps.

    >>> norm(torch.tensor([3.0, 4.0]))
    tensor([0.8485, 1.1314])
    """
    return rms_norm(x, x.shape[-1:])


def rotary_angles(length: int, half: int, base: float = 10000.0) -> Tensor:
    """Return position base^(-i / half), i < half, as (length, half) in fp64 on the CPU.

    >>> rotary_angles(2, 2)
    tensor([[0.0000, 0.0000],
            [1.0000, 0.0100]], dtype=torch.float64)
    """
    positions, i = (torch.arange(n, dtype=torch.float64, device="cpu") for n in (length, half))
    return torch.outer(positions, base ** (-i / half))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x1_i, x2_i) from the two halves of the last dimension by -angle_i.

        y1 = x1 cos + x2 sin,   y2 = -x1 sin + x2 cos

    >>> rotate(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0]]), torch.tensor([[1.0]]))
    tensor([[ 0., -1.]])
    """
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos + x2 * sin, x2 * cos - x1 * sin), dim=-1)
