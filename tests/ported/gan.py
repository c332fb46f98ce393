"""Two models that train against each other, each with an optimizer of its own."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def train(strategy):
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 5))
    critic = nn.Sequential(nn.Linear(5, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.999))
    c_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2, betas=(0.5, 0.999))
    loader = DataLoader(TensorDataset(torch.randn(41, 5), torch.randn(41, 3)), batch_size=8)
    if strategy is not None:
        generator, g_optimizer, _ = strategy.prepare(generator, g_optimizer)
        critic, c_optimizer, loader = strategy.prepare(critic, c_optimizer, loader)
    for _ in range(2):
        for real, noise in loader:
            ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            c_optimizer.zero_grad()
            fake = generator(noise)
            on_real = F.binary_cross_entropy_with_logits(critic(real), ones)
            on_fake = F.binary_cross_entropy_with_logits(critic(fake.detach()), zeros)
            on_real.backward()
            on_fake.backward()
            c_optimizer.step()
            g_optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(critic(fake), ones).backward()
            g_optimizer.step()
    return {**generator.state_dict(prefix="g."), **critic.state_dict(prefix="c.")}
