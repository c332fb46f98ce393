"""Layers that are trained one by one, each by a loss and an optimizer of its own."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def goodness(x):
    return x.pow(2).mean(1)


def train(strategy):
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 8)])
    optimizers = [torch.optim.Adam(layer.parameters(), lr=1e-2) for layer in layers]
    loader = DataLoader(TensorDataset(torch.randn(29, 6), torch.randn(29, 6)), batch_size=8)
    if strategy is not None:
        for layer, optimizer in zip(layers, optimizers, strict=True):
            strategy.prepare(layer, optimizer)
        loader = strategy.prepare(loader)
    for _ in range(2):
        for positive, negative in loader:
            for layer, optimizer in zip(layers, optimizers, strict=True):
                yes, no = torch.relu(layer(positive)), torch.relu(layer(negative))
                margins = torch.cat([0.5 - goodness(yes), goodness(no) - 0.5])
                loss = torch.log1p(torch.exp(margins)).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                positive, negative = yes.detach(), no.detach()
    return layers.state_dict()
