"""A graph net whose every step takes the one graph there is; a mask says which nodes count."""

import torch
from torch import nn
from torch.nn import functional as F


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x, adjacency):
        return F.log_softmax(self.second(adjacency @ torch.relu(self.first(adjacency @ x))), dim=1)


def train(strategy):
    torch.manual_seed(0)
    x, y = torch.randn(31, 5), torch.randint(0, 3, (31,))
    adjacency = (torch.rand(31, 31) < 0.2).double() + torch.eye(31)
    adjacency = adjacency / adjacency.sum(1, keepdim=True)
    known = torch.rand(31) < 0.4
    model = Convolution()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
    if strategy is not None:
        model, optimizer, _ = strategy.prepare(model, optimizer)
    for _ in range(6):
        optimizer.zero_grad()
        F.nll_loss(model(x, adjacency)[known], y[known]).backward()
        optimizer.step()
    return model.state_dict()
