"""A variational autoencoder: a summed reconstruction loss and a summed divergence."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(12, 8)
        self.mean, self.variance = nn.Linear(8, 2), nn.Linear(8, 2)
        self.decoder = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 12))

    def forward(self, x, noise):
        hidden = torch.tanh(self.encoder(x))
        mu, log_var = self.mean(hidden), self.variance(hidden)
        z = mu + torch.exp(0.5 * log_var) * noise
        return torch.sigmoid(self.decoder(z)), mu, log_var


def loss_of(output, x, mu, log_var):
    reconstruction = F.binary_cross_entropy(output, x, reduction="sum")
    divergence = -0.5 * torch.sum(1 + log_var - mu.pow(2) - log_var.exp())
    return reconstruction + divergence


def train(strategy):
    torch.manual_seed(0)
    model = Autoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = TensorDataset(torch.rand(53, 12), torch.randn(53, 2))
    loader = DataLoader(data, batch_size=10)
    if strategy is not None:
        model, optimizer, loader = strategy.prepare(model, optimizer, loader)
    for _ in range(2):
        for x, noise in loader:
            optimizer.zero_grad()
            output, mu, log_var = model(x, noise)
            loss_of(output, x, mu, log_var).backward()
            optimizer.step()
    return model.state_dict()
