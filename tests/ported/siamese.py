"""Pairs through one net, whose dataset makes the second half of each pair by an augmentation."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Pairs(Dataset):
    def __init__(self):
        self.x = torch.randn(45, 6)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        alike = i % 2
        other = self.x[i].roll(i % 3) if alike else self.x[(i * 7 + 3) % len(self.x)]
        return self.x[i], other, torch.tensor(float(alike))


def train(strategy):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    loader = DataLoader(
        Pairs(), batch_size=7, shuffle=True, generator=torch.Generator().manual_seed(1)
    )
    if strategy is not None:
        model, optimizer, loader = strategy.prepare(model, optimizer, loader)
    for _ in range(2):
        for a, b, alike in loader:
            distance = F.pairwise_distance(model(a), model(b))
            pull = alike * distance.pow(2)
            push = (1 - alike) * torch.clamp(1.5 - distance, min=0).pow(2)
            loss = torch.mean(pull + push)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.state_dict()
