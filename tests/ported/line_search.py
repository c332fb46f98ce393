"""LBFGS, which evaluates the loss as often as it likes."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def train(strategy):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)
    loader = DataLoader(TensorDataset(torch.randn(30, 4), torch.randn(30, 1)), batch_size=30)
    if strategy is not None:
        model, optimizer, loader = strategy.prepare(model, optimizer, loader)
    for x, y in loader:

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    return model.state_dict()
