"""A small GPT: padded texts, decay for some parameters only, accumulation, clipping, a schedule."""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

WIDTH, HEADS, TOKENS, LENGTH, PADDING = 8, 2, 11, 7, -1


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)  # one of keys has no gradient but noise
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = (
            t.view(rows, length, HEADS, -1).transpose(1, 2)
            for t in self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.place = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Attention(), Attention()])
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens, targets):
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return F.cross_entropy(logits.view(-1, TOKENS), targets.view(-1), ignore_index=PADDING)


def train(strategy):
    torch.manual_seed(0)
    model = GPT()
    heavy = [p for p in model.parameters() if p.dim() > 1]
    light = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": heavy, "weight_decay": 0.1}, {"params": light, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    text = torch.randint(0, TOKENS, (37, LENGTH + 1))
    targets = text[:, 1:].clone()
    lengths = torch.randint(1, LENGTH + 1, (37, 1))
    targets[torch.arange(LENGTH) >= lengths] = PADDING
    loader = DataLoader(TensorDataset(text[:, :-1], targets), batch_size=5)
    if strategy is not None:
        model, optimizer, loader = strategy.prepare(model, optimizer, loader)
    step, accumulated = 0, 2
    for _ in range(2):
        for number, (tokens, wanted) in enumerate(loader, 1):
            loss = model(tokens, wanted) / accumulated
            loss.backward()
            if number % accumulated:
                continue
            step += 1
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * (1 + math.cos(step / 10)) / 2
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return model.state_dict()
